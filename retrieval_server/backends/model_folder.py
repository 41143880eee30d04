"""A model's folder: where it is, what it says about pooling and prefixes, and a fingerprint of what it computes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from retrieval_server.backends.encodings import Declared
from retrieval_server.corpus import file_sha256
from retrieval_server.encode_options import Pooling
from retrieval_server.errors import SettingsError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = ("tokenizer*.json", "vocab.*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json")
# Keys of config.json that say who wrote the file and not what the model computes.
_PROVENANCE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")
_DOWNLOADED = ["*.json", "*.txt", "*.model", "*.safetensors"]
_NOT_DOWNLOADED = ["onnx/*", "openvino/*", "*.onnx*"]
_QUERY_PROMPTS = ("query", "search_query", "s2p_query")
_PASSAGE_PROMPTS = ("passage", "document", "search_document", "corpus")


def local_folder(model_path: str) -> Path:
    """Return the folder of a model: itself, or the (downloaded) snapshot of a name on the hub; raises SettingsError."""
    path = Path(model_path)
    if path.is_dir():
        return path
    if path.is_absolute() or model_path.startswith(".") or model_path.count("/") > 1:
        raise SettingsError(f"encoder {model_path}: no such folder")
    import huggingface_hub

    def snapshot(*patterns: str) -> Path:
        wanted = [*_DOWNLOADED, *patterns]
        return Path(
            huggingface_hub.snapshot_download(model_path, allow_patterns=wanted, ignore_patterns=_NOT_DOWNLOADED)
        )

    try:
        folder = snapshot()
        return folder if _weights(transformer_folder(folder)) else snapshot("pytorch_model*.bin")
    except (OSError, ValueError) as error:  # LocalEntryNotFoundError, HfHubHTTPError, HFValidationError
        reason = str(error).strip().split("\n")[0]
        raise SettingsError(
            f"encoder {model_path} is neither a folder nor to be had from the Hugging Face hub ({reason}); "
            "download it where there is a network and give its folder"
        ) from None


def _weights(folder: Path) -> list[Path]:
    """Return the weight files that transformers would load: safetensors where there are any."""
    for pattern in _WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def fingerprint(folder: Path) -> str:
    """Return a digest of weights, configuration and tokenizer; the same for every copy of a model.

    The files are hashed, so another library version does not change it. Raises SettingsError without weights.
    """
    main = transformer_folder(folder)
    config = {key: value for key, value in _json(main / "config.json").items() if key not in _PROVENANCE}
    weights = _weights(main)
    if not weights:
        raise SettingsError(f"encoder {folder} has no {' and no '.join(_WEIGHTS)}: not a model's folder, or incomplete")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    extra = [path for pattern in _TOKENIZER for path in main.glob(pattern)]
    extra += [path for module in _modules(folder)[1:] for path in (folder / module.path).glob("*")]
    for path in sorted({*weights, *extra}):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}; not a model's folder, or incomplete") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON ({error}); get the model again") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds a JSON {type(content).__name__}, not an object; get the model again")
    return content


@dataclass(frozen=True, slots=True)
class _Module:
    kind: str
    """Transformer, Pooling, Dense, Normalize."""
    path: str


def _modules(folder: Path) -> list[_Module]:
    """Return the pipeline of a sentence-transformers folder; empty for a plain transformers one."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [_Module(entry["type"].rpartition(".")[2], entry["path"]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path} cannot be read as a list of modules ({error}); get the model again") from None


def transformer_folder(folder: Path) -> Path:
    """Return where config.json and the weights lie: the folder itself, but for some older sentence-transformers."""
    modules = _modules(folder)
    return folder / modules[0].path if modules else folder


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    """What a sentence-transformers folder declares; of a plain folder, nothing."""

    declared: Declared
    max_length: int | None = None
    """Tokens that the model was made for."""
    projections: tuple[Path, ...] = ()
    """Folders of linear layers between pooling and normalisation."""


def read_sentence_transformer(folder: Path) -> SentenceTransformer:
    """Read modules.json and what it names, prompts included; raises SettingsError for a step that is not supported."""
    modules = _modules(folder)
    if not modules:
        return SentenceTransformer(Declared())
    kinds = [module.kind for module in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")]
    if unknown or kinds[0] != "Transformer" or kinds.count("Pooling") != 1:
        raise SettingsError(
            f"{folder / 'modules.json'} is a pipeline of {', '.join(kinds)}; supported: Transformer, Pooling, "
            "Dense, Normalize, in that order"
        )
    pooling = folder / modules[kinds.index("Pooling")].path / "config.json"
    query_prefix, passage_prefix = _prompts(folder)
    transformer = folder / modules[0].path / "sentence_bert_config.json"
    limit = _json(transformer).get("max_seq_length") if transformer.exists() else None
    return SentenceTransformer(
        Declared(_pooling(pooling), "Normalize" in kinds, query_prefix, passage_prefix),
        limit if isinstance(limit, int) else None,
        tuple(folder / module.path for module in modules if module.kind == "Dense"),
    )


def _pooling(path: Path) -> Pooling:
    config = _json(path)
    if config.get("include_prompt") is False:
        raise SettingsError(f"{path} leaves the prefix out of the pooling (include_prompt), which is not supported")
    newer = config.get("pooling_mode")
    modes = [newer] if isinstance(newer, str) else [key for key, on in config.items() if "pooling_mode" in key and on]
    names = {mode.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for mode in modes}
    for pooling in get_args(Pooling):
        if names == {pooling}:
            return pooling  # type: ignore[no-any-return]
    raise SettingsError(f"{path} asks for pooling {sorted(names)}; supported: {', '.join(get_args(Pooling))}")


def _prompts(folder: Path) -> tuple[str | None, str | None]:
    """Return (query prefix, passage prefix); None for an absent or empty one, which only says that none was set."""
    path = folder / "config_sentence_transformers.json"
    prompts = (_json(path).get("prompts") if path.exists() else None) or {}
    found = [
        next((prompts[name] for name in names if prompts.get(name)), None)
        for names in (_QUERY_PROMPTS, _PASSAGE_PROMPTS)
    ]
    return found[0], found[1]
