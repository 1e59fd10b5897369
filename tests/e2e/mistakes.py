"""Mistakes that people make, what they type, and what they are told.

`test_mistakes.py` and `test_mistakes_in_runs.py` make each of them; docs/troubleshooting.md is made
from this table by `python -m tests.e2e.mistakes`. In a command, @ stands for the configuration, %
for its folder.
"""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
MARK = "<!-- made by `python -m tests.e2e.mistakes` from tests/e2e/mistakes.py -->"


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        what: in words.
        command: arguments of `async-grpo`.
        code: the exit code.
        says: parts of the message, in order; shown in the docs joined by "...".
    """

    what: str
    command: str
    code: int
    says: tuple[str, ...]


CONFIGURATION = [
    Mistake("a field misspelled", "check @ staleness.max_stalenes=3", 2,
            ("staleness.max_stalenes: no such field; did you mean max_staleness?",)),
    Mistake("an unknown section", "check @ nosuch.x=1", 2,
            ("nosuch: no such field; there are run, policy, task",)),
    Mistake("a value of the wrong type", "check @ trainer.lr=fast", 2,
            ("trainer.lr: Value 'fast' of type 'str' could not be converted to Float",)),
    Mistake("several problems at once",
            "check @ trainer.lr=-1 generation.group_size=1 staleness.max_stalenes=3", 2,
            ("no such field", "trainer.lr must be > 0, got -1", "group_size must be >= 2")),
    Mistake("a configuration that is not there", "check nowhere.yaml", 2,
            ("cannot read nowhere.yaml: No such file or directory",)),
    Mistake("a file that is no YAML", "check %/bad.yaml", 2, ("bad.yaml is not valid YAML",)),
    Mistake("a file that is a list", "check %/list.yaml", 2,
            ("list.yaml must hold sections (a mapping), got list",)),
    Mistake("a required field left out", "check %/empty.yaml", 2,
            ("policy.model is required: set it in", "run.output_dir is required")),
    Mistake("an override without =", "check @ lr", 2,
            ("override 'lr' must have the form section.key=value",)),
    Mistake("an override of a whole section", "check @ staleness=3", 2,
            ("staleness: is a section; set its fields, as staleness.FIELD=value",)),
    Mistake("an unknown command", "frobnicate @", 2, ("invalid choice: 'frobnicate'", "run")),
    Mistake("no CONFIG", "run", 2, ("the following arguments are required: CONFIG",)),
    Mistake("an unknown option", "check @ --jsno", 2, ("unrecognized arguments: --jsno",)),
    Mistake("a negative number", "check @ replay.groups_per_step=-4", 2,
            ("replay.groups_per_step must be > 0, got -4",)),
    Mistake("groups of one", "check @ generation.group_size=1", 2,
            ("generation.group_size must be >= 2: a group of one has no advantage",)),
    Mistake("temperature 0", "check @ generation.temperature=0", 2,
            ("generation.temperature must be > 0",)),
    Mistake("completions as long as the context", "check @ generation.max_new_tokens=40", 2,
            ("generation.max_new_tokens (40) must be below engine.context_length (32)",)),
    Mistake("run-ahead beyond the bound", "check @ staleness.pipeline_depth=9", 2,
            ("staleness.pipeline_depth (9) must be <= staleness.max_staleness (4)",)),
    Mistake("publishing too rarely (a deadlock)", "check @ weights.publish_every=9", 2,
            ("weights.publish_every (9) must be <= staleness.pipeline_depth + 1 (3)",
             "the trainer waits for groups that only the next publish would admit")),
    Mistake("a buffer below one step, in groups (a deadlock)", "check @ replay.max_groups=2", 2,
            ("replay.max_groups (2) must be at least 8 (groups_per_step)",)),
    Mistake("a buffer below one step, in bytes (a deadlock)", "check @ replay.max_bytes=1000", 2,
            ("replay.max_bytes (1000) must hold 8 groups",)),
    Mistake("a buffer below the window, drawn by ticket (a deadlock)",
            "check @ replay.max_groups=8 staleness.draw_order=ticket", 2,
            ("replay.max_groups (8) must be at least 24",)),
    Mistake("groups larger than the limit", "check @ replay.max_group_bytes=10", 2,
            ("replay.max_group_bytes (10) is below the 160 bytes of a group",)),
    Mistake("more updates than groups", "check @ trainer.updates_per_step=9", 2,
            ("trainer.updates_per_step (9) must be <= replay.groups_per_step (8)",)),
    Mistake("a time-out shorter than heartbeats", "check @ replay.peer_timeout_s=0.6", 2,
            ("replay.peer_timeout_s (0.6) must be at least twice replay.heartbeat_s (0.5)",)),
    Mistake("an address without scheme", "check @ replay.address=localhost:1", 2,
            ("replay.address must start with tcp:// or ipc://",)),
    Mistake("an impossible port", "check @ replay.address=tcp://127.0.0.1:99999", 2,
            ("replay.address must end with a port of 0 to 65535",)),
    Mistake("an engine URL without scheme", "check @ engine.urls=[host:1]", 2,
            ("engine.urls: 'host:1' must start with http:// or https://",)),
    Mistake("NCCL, and an engine on the trainer's card",
            "check @ engine.kind=sglang engine.python=python3 engine.device_ids=['0'] "
            "weights.backend=nccl", 2,
            ("engine.device_ids: card 0 is the trainer's too", "NCCL refuses a shared card",
             "set weights.backend=gloo")),
    Mistake("a run directory that is none", "audit %/nothing", 2, ("is no run directory",)),
]  # fmt: skip

MODEL_AND_TASK = [
    Mistake("a model path that is not there", "generator @ --name g policy.model=%/nothing", 2,
            ("policy.model: there is no directory",)),
    Mistake("a directory without a model", "trainer @ policy.model=%/hollow", 2,
            ("has no config.json, *.safetensors", "as save_pretrained()")),
    Mistake("a model whose files were cut off", "engine @ policy.model=%/cut_off", 2,
            ("policy.model: cannot load", "Error while deserializing header")),
    Mistake("a model whose files lack weights", "trainer @ policy.model=%/too_few", 2,
            ("policy.model: the files in", "tensors that its config.json asks for",
             "model.layers.2.")),
    Mistake("a model without a tokenizer", "generator @ --name g policy.model=%/no_tokenizer", 2,
            ("has no tokenizer.json",)),
    Mistake("a model that is still to be made",
            "generator @ --name g policy.model=%/nothing policy.maker=a:b", 2,
            ("is not there yet; make it with `async-grpo prepare CONFIG`",)),
    Mistake("a maker that fails", "prepare @ policy.model=%/made policy.maker=json:loads", 2,
            ("policy.maker: 'json:loads' failed: TypeError",)),
    Mistake("a tokenizer without chat template", "generator @ --name g task.chat_template=true", 2,
            ("has no chat template; set task.chat_template=false",)),
    Mistake("prompts longer than the context", "generator @ --name g engine.context_length=8", 2,
            ("engine.context_length (8) is below the", "raise it, or shorten prompts")),
    Mistake("more engines than cards",
            "generator @ --name g engine.kind=sglang engine.python=python3 engine.num_engines=99",
            2, ("engine.num_engines (99): engines need 99 cards", "start fewer")),
    Mistake("an unknown task", "generator @ --name g task.name=nosuch", 2,
            ("task.name: no task 'nosuch'; known are arithmetic, jsonl, reverse",)),
    Mistake("a wrong task option", "generator @ --name g task.options.lenght=3", 2,
            ("task.options of reverse: got an unexpected keyword argument 'lenght'",)),
    Mistake("a data file that is not there", "generator %/data.yaml --name g", 2,
            ("task.options.path: cannot read",)),
    Mistake("an empty data file", "generator %/data.yaml --name g task.options.path=%/empty.yaml",
            2, ("holds no prompts",)),
    Mistake("data with a bad row", "generator %/data.yaml --name g task.options.path=%/rows.jsonl",
            2, ("rows.jsonl:2: 'answer' must be a string or a number",)),
    Mistake("a reward module that is not there", "generator @ --name g task.reward=nosuch:f", 2,
            ("task.reward: cannot import 'nosuch'", "current directory and in PYTHONPATH")),
    Mistake("the same in a whole run",
            "run @ run.output_dir=%/never replay.address=tcp://127.0.0.1:0 task.reward=nosuch:f", 2,
            ("generator-0 ended with exit code 2 (configuration); see",
             "task.reward: cannot import 'nosuch'")),
    Mistake("a reward module that fails", "generator @ --name g task.reward=raises:f", 2,
            ("task.reward: importing 'raises' failed: ValueError: on purpose",)),
    Mistake("a reward that is not in its module", "generator @ --name g task.reward=json:f", 2,
            ("task.reward: module 'json' has no attribute 'f'",)),
    Mistake("a name that is no file name", "generator @ --name a/b", 2,
            ("--name 'a/b' may hold letters, digits",)),
    Mistake("more ranks than there are", "trainer @ --nproc 2", 2, ("one rank in this version",)),
]  # fmt: skip

PEERS = [
    Mistake("a file in place of the run directory", "replay @ run.output_dir=%/empty.yaml", 2,
            ("run.output_dir: cannot write to", "choose a directory of your own")),
    Mistake("a run directory that holds a run already", "run @ run.output_dir=%/old", 2,
            ("already holds a run", "continue it with --resume, choose another run.output_dir")),
    Mistake("a run resumed with other settings",
            "run @ run.output_dir=%/old --resume trainer.lr=0.5", 2,
            ("--resume: trainer.lr: the run has", "now it is 0.5")),
    Mistake("nothing to export", "export %/old %/out", 2,
            ("has no checkpoint and no final_model yet",)),
    Mistake("no samples", "samples %/old", 2,
            ("cannot be read: No such file or directory; a generator writes it",)),
    Mistake("port 0 for a generator alone", "generator @ --name g replay.address=tcp://127.0.0.1:0",
            2, ("must name a port: it is the replay server that may choose one",)),
    Mistake("no replay server at the address", "generator @ --name g", 3,
            ("did not answer 'Hello' within", "start it with `async-grpo replay CONFIG`")),
    Mistake("a host that cannot be resolved",
            "generator @ --name g replay.address=tcp://nohost.invalid:5000", 3,
            ("replay server at tcp://nohost.invalid:5000 did not answer", "or correct replay")),
]  # fmt: skip

# With a replay server that runs at $ and whose run directory is %/run.
BESIDE_A_SERVER = [
    Mistake("the address is in use", "replay @ run.output_dir=%/other replay.address=$", 2,
            ("replay.address: cannot bind", "Address already in use", "; choose another port")),
    Mistake("two replay servers on one run", "replay @ replay.address=tcp://127.0.0.1:0", 1,
            ("is in use by another replay server: stop it, or give this run its own",)),
    Mistake("resuming a run that goes on", "run @ --resume", 2,
            ("--resume: the run in", "is still going on")),
    Mistake("the run directory of another run",
            "replay @ replay.address=tcp://127.0.0.1:0 staleness.max_staleness=2", 2,
            ("holds a run of another configuration", "staleness.max_staleness: the run has 4, "
             "now it is 2", "choose another run.output_dir")),
    Mistake("a generator with another configuration",
            "generator @ --name g replay.address=$ staleness.max_staleness=2", 3,
            ("g was started from another configuration", "start every role from the same file")),
    Mistake("another machine's address for update groups",
            "trainer @ replay.address=$ weights.host=192.0.2.1", 2,
            ("weights.host: cannot listen at 192.0.2.1", "an address of the trainer's machine")),
    Mistake("an engine URL that refuses",
            "generator @ --name g replay.address=$ engine.urls=[http://127.0.0.1:9]", 3,
            ("in vain for an engine to answer", "http://127.0.0.1:9")),
]  # fmt: skip

ATTACH = "generator @ --name g replay.address=$ engine.urls=[URL]"
NO_ENGINE = "in vain for an engine to answer"
# The same, with an engine at URL that is not as it should be.
AT_AN_ENGINE = [
    Mistake("an engine that answers 500", ATTACH, 3, (NO_ENGINE, "HTTP 500")),
    Mistake("an engine with a model of another vocabulary", ATTACH, 3,
            (NO_ENGINE, "serves a model of 640 token ids, but the policy has",
             "start the server with the policy's model")),
    Mistake("an engine that asks for a key", ATTACH, 3, (NO_ENGINE, "HTTP 401")),
    Mistake("an engine whose context is too short for the prompts", ATTACH, 2,
            ("context of engine g/0#", "(9) is below the", "raise it, or shorten prompts")),
]  # fmt: skip

NO_GROUPS = "handed out no groups within"
FAILED = "last error of generator-0: group"
# Whole runs in which no group ever comes to be trained; the message is in what they print, where a
# newer error takes the place of an older one: one mistake a run. $ is an engine that somebody else
# has started.
WRONG_REWARDS = [
    Mistake("a reward that raises, always", "run @ task.reward=mine:raises", 3,
            (FAILED, "completions: error (prompt", "ValueError: on purpose", NO_GROUPS,
             "groups ended as reward_failed: completions got no reward")),
    Mistake("a reward that hangs, always",
            "run @ task.reward=mine:hangs task.reward_timeout_s=0.2", 3,
            (FAILED, "no reward within 0.2 s", NO_GROUPS, "last error   generator-0")),
    Mistake("a reward that is no number, always", "run @ task.reward=mine:no_number", 3,
            (FAILED, "returned nan, which is not finite", NO_GROUPS)),
]  # fmt: skip
UNEARNED = Mistake(
    "a reward that no completion earns",
    "run @ task.reward=mine:never algorithm.zero_variance=drop", 3,
    ("no_signal)", NO_GROUPS, "groups ended as no_signal, mean reward 0.000: every completion of "
     "such a group got the same reward: look at task.reward", "no_signal) + "))  # fmt: skip
SHORT_LIST = Mistake(
    "an engine that answers lists of the wrong length", "run @ engine.urls=[$]", 3,
    (FAILED, "log-probs, completion_tokens", NO_GROUPS))  # fmt: skip
NULL_LOGPROB = Mistake(
    "an engine whose log-probs are no numbers", "run @ engine.urls=[$]", 3,
    (FAILED, "refused: the log-prob at", "is None", NO_GROUPS))  # fmt: skip
IN_A_RUN = [*WRONG_REWARDS, UNEARNED, SHORT_LIST, NULL_LOGPROB]

EVERYTHING = [*CONFIGURATION, *MODEL_AND_TASK, *PEERS, *BESIDE_A_SERVER, *AT_AN_ENGINE, *IN_A_RUN]


def table(mistakes: list[Mistake]) -> list[str]:
    """Rows of a page."""
    lines = ["| mistake | command | exit | message |", "|---|---|---|---|"]
    for mistake in mistakes:
        command = mistake.command.replace("@", "CONFIG").replace("%/", "")
        command = command.replace("=$", "=ADDRESS").replace("[$]", "[URL]")
        says = " ... ".join(mistake.says).replace("|", "\\|")
        lines.append(f"| {mistake.what} | `{command}` | {mistake.code} | {says} |")
    return lines


def page(text: str) -> str:
    """`text` of the page with the tables after the mark brought up to date."""
    head = text.partition(MARK)[0]
    lines = [MARK, "", "### Configuration", "", *table(CONFIGURATION)]
    lines += ["", "### Model, task, reward", "", *table(MODEL_AND_TASK)]
    lines += ["", "### Peers", "", *table([*PEERS, *BESIDE_A_SERVER, *AT_AN_ENGINE])]
    lines += ["", "### In a run", "", *table(IN_A_RUN)]
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
