import subprocess
import sys


def test_the_generator_starts_without_torch():
    program = (
        "import sys, async_grpo.roles.generator; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "[]"
