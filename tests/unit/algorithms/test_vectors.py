"""Every number of tests/vectors, by the tool that users run; and the tool's own honesty."""

import copy
import json
import random
import sys
from itertools import chain
from pathlib import Path

import naive_losses
import pytest

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "vectors" / "vectors.json"
CONTENT = json.loads(FILE.read_text())
VECTORS = {vector["name"]: vector for vector in CONTENT["vectors"]}


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import check_vectors

        yield check_vectors
    finally:
        sys.path.remove(str(ROOT / "tools"))


def outcome(tool, vector):
    return tool.check(vector, CONTENT["tolerance"], CONTENT["grad_tolerance"])


@pytest.mark.parametrize("name", VECTORS)
def test_vector(tool, name):
    assert outcome(tool, VECTORS[name]) == ("ok", "")


def numbers(values, path=()):
    """Paths of all numbers."""
    if isinstance(values, dict):
        return [p for key, value in values.items() for p in numbers(value, (*path, key))]
    if isinstance(values, list):
        return [p for key, value in enumerate(values) for p in numbers(value, (*path, key))]
    return [path]


def spoil(values, path):
    for key in path[:-1]:
        values = values[key]
    old = values[path[-1]]
    if isinstance(old, bool):
        values[path[-1]] = not old
    elif isinstance(old, str):
        values[path[-1]] = 0.0
    else:
        values[path[-1]] = old + max(1.0, abs(old)) * 2e-3


@pytest.mark.parametrize("name", VECTORS)
def test_any_one_wrong_number_fails(tool, name):
    """Each expected value is compared, not only the first."""
    paths = numbers(VECTORS[name]["expected"])
    chosen = random.Random(name).sample(paths, min(4, len(paths)))
    for path in chosen:
        vector = copy.deepcopy(VECTORS[name])
        spoil(vector["expected"], path)
        assert outcome(tool, vector)[0] == "FAIL", path


def test_every_expected_name_is_compared(tool):
    vector = copy.deepcopy(VECTORS["loss_gspo"])
    vector["expected"]["something_else"] = 1.0
    assert outcome(tool, vector) == ("FAIL", "nothing computes something_else")


def test_the_command(tool, tmp_path, capsys):
    assert tool.main([str(FILE)]) == 0
    assert capsys.readouterr().out.endswith(f"{len(VECTORS)} ok, 0 FAIL, 0 skipped\n")
    wrong = copy.deepcopy(CONTENT)
    loss = wrong["vectors"][16]["expected"]["loss"]
    wrong["vectors"][16]["expected"]["loss"] = loss + 1e-8
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(wrong))
    assert tool.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert f"FAIL    {wrong['vectors'][16]['name']}: loss: expected" in out
    assert "63 ok, 1 FAIL, 0 skipped" in out
    path.write_text(json.dumps({"vectors": [{**VECTORS["loss_gspo"], "name": "loss_unheard_of"}]}))
    assert tool.main([str(path)]) == 1
    assert "skipped loss_unheard_of: no part" in capsys.readouterr().out
    path.write_text(json.dumps({"vectors": []}))
    assert tool.main([str(path)]) == 1


def other_inputs(rng, name):
    """A batch of other shape and numbers, away from where clips begin."""
    lengths = [rng.randint(1, 6) for _ in range(5)]
    width = max(lengths)

    def grid(draw):
        return [[draw() if t < n else 0.0 for t in range(width)] for n in lengths]

    behavior = grid(lambda: -rng.uniform(0.05, 2.5))

    def near(spread):
        return [
            [min(b + rng.uniform(-spread, spread), -1e-3) if t < n else 0.0
             for t, b in enumerate(row)]
            for row, n in zip(behavior, lengths, strict=True)
        ]  # fmt: skip

    advantages = [rng.choice([-1, 1]) * rng.uniform(0.2, 2) for _ in lengths]
    return {
        "logp": near(0.7), "prox": near(0.6), "behav": behavior, "ref": near(0.5),
        "old": near(2.0),
        "mask": grid(lambda: 1.0),
        "adv": [
            [a if t < n else 0.0 for t in range(width)]
            for a, n in zip(advantages, lengths, strict=True)
        ],
    }  # fmt: skip


def away_from_kinks(name, inputs, config):
    """Whether a step of 1e-6 changes the one-sided slopes by little: no clip begins there."""
    fine = naive_losses.expected(name, inputs, config, step=1e-6)["grad_logp"]
    coarse = naive_losses.expected(name, inputs, config, step=1e-5)["grad_logp"]
    pairs = zip(chain(*fine), chain(*coarse), strict=True)
    return all(abs(one - other) < 1e-8 for one, other in pairs)


@pytest.mark.parametrize("name", naive_losses.NAIVE)
def test_other_inputs_of_the_same_form(tool, tmp_path, name):
    """A file of other batches, its numbers from a naive loop in plain Python, passes."""
    config, vectors, rng = VECTORS[name]["config"], [], random.Random(name)
    while len(vectors) < 3:
        inputs = other_inputs(rng, name)
        if away_from_kinks(name, inputs, config):
            expected = naive_losses.expected(name, inputs, config)
            vectors.append({"name": name, "inputs": inputs, "config": config, "expected": expected})
    path = tmp_path / "others.json"
    path.write_text(json.dumps({"vectors": vectors}))
    assert tool.main([str(path)]) == 0


@pytest.mark.parametrize("name", naive_losses.NAIVE)
def test_the_naive_loop_agrees_with_the_file(name):
    """Or the test above would prove nothing."""
    vector = VECTORS[name]
    found = naive_losses.expected(name, vector["inputs"], vector["config"])
    for key in ("loss", "per_token", "grad_logp"):
        if key in vector["expected"]:
            flat = numbers(vector["expected"][key])
            for path in flat:
                one, other = vector["expected"][key], found[key]
                for step in path:
                    one, other = one[step], other[step]
                assert other == pytest.approx(one, abs=2e-8 if key == "grad_logp" else 1e-9)
