from pathlib import Path

import pytest

MINIMAL = """
run: {{output_dir: {out}, num_train_steps: 4}}
policy: {{model: {out}/model}}
task: {{name: reverse}}
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL.format(out=tmp_path / "out"))
    return path
