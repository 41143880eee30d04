"""What the rows of ``gpu_check`` share: a random model, a configuration without files, a task without services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils.logging import disable_progress_bar

from verl.config import RunConfig
from verl.data.batch import MicroBatch, Scored, pack_batch
from verl.types import EpisodeContext, Generate, Origin, Prompt, Reward, Sampling, Segment, StopReason, Trajectory
from verl.workers.device import Device, setup_device
from verl.workers.engine import Engine, EngineSpec
from verl.workers.optim import OptimSpec

#: The shape of Qwen2.5-0.5B, and one with every part of it for trying the code out.
LARGE = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


class Skip(Exception):
    """A row cannot run here; the message is the missing piece."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    check: Callable[[Any], str]
    """Takes the setting and returns what was measured; raises AssertionError with the figure that is wrong."""
    needs: tuple[Callable[[Any], str | None], ...] = ()
    """Each returns the missing piece, or None."""


@dataclass(frozen=True)
class Setting:
    """Where and on what the rows run."""

    device: Device
    folder: Path
    """Scratch; removed at the end."""
    tiny: bool

    @classmethod
    def prepare(cls, folder: Path, tiny: bool) -> Setting:
        """Write the model folder."""
        disable_progress_bar()
        setting = cls(setup_device(), folder, tiny)
        _write_model(setting.model, TINY if tiny else LARGE, setting.device.torch_device)
        (folder / "run").mkdir()
        return setting

    @property
    def model(self) -> Path:
        """The model folder."""
        return self.folder / "model"

    def describe(self) -> str:
        """Return one line about device, versions and model."""
        import transformers

        name = torch.cuda.get_device_name() if self.device.torch_device.type == "cuda" else "CPU"
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(self.model).parameters())
        return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {parameters:,} parameters"

    def config(self, dtype: str = "bfloat16", **rollout: Any) -> RunConfig:
        """Return a PPO run of ``EvenTokens`` in one process, as ``load_config`` would from a file."""
        model = {"path": str(self.model), "dtype": dtype}
        offload = {"param_offload": False, "optimizer_offload": False}
        values = {
            "task": "gpu_setting:EvenTokens",
            "data": {
                "max_prompt_length": 256, "max_response_length": 24 if self.tiny else 128, "max_start_length": 64,
                "max_obs_length": 64, "train_batch_size": 8 if self.tiny else 16,
            },
            "actor_rollout_ref": {
                "model": model,
                "actor": {
                    "ppo_mini_batch_size": 8 if self.tiny else 16, "use_dynamic_bsz": True,
                    "ppo_max_token_len_per_gpu": 8192, "entropy_coeff": 0.0,
                    "optim": {"lr": 1e-2 if self.tiny else 1e-4},
                    "fsdp_config": offload,
                },
                "rollout": {"name": "hf", "dtype": dtype, "max_num_seqs": 64, "chunk_size": 64} | rollout,
            },
            "critic": {
                "model": model, "ppo_mini_batch_size": 8 if self.tiny else 16, "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": 8192,
            },
            "algorithm": {"kl_ctrl": {"kl_coef": 0.0}},
            "trainer": {
                "n_gpus_per_node": 1, "val_before_train": False, "default_local_dir": str(self.folder / "run"),
            },
            "cluster": {"kind": "local", "threads_per_worker": torch.get_num_threads()},
        }  # fmt: skip
        return RunConfig.model_validate(values).model_copy(update={"task_config": EvenTokens.config_schema()()})

    def spec(self, dtype: str = "bfloat16", **changes: Any) -> EngineSpec:
        """Return what the training engine loads; AdamW at a rate that moves weights."""
        values: dict[str, Any] = {"model_path": str(self.model), "seed": 1, "dtype": dtype}
        return EngineSpec(**(values | {"optim": OptimSpec(lr=1e-4, total_steps=10)} | changes))

    def engine(self, dtype: str = "bfloat16", **changes: Any) -> Engine:
        """Load a training engine on the device."""
        return Engine(self.spec(dtype, **changes), self.device)

    def sequences(self, lengths: Sequence[int]) -> list[Scored]:
        """Return random sequences of which all tokens but the first are scored."""
        size = (TINY if self.tiny else LARGE)["vocab_size"]
        generator = torch.Generator().manual_seed(7)
        ids = [torch.randint(0, size, (length,), generator=generator).tolist() for length in lengths]
        return [Scored(row, (False, *(True,) * (len(row) - 1)), {}) for row in ids]

    def batch(self, lengths: Sequence[int]) -> MicroBatch:
        """Return these sequences packed, with the counts of a whole mini-batch."""
        total = float(sum(lengths) - len(lengths))
        return pack_batch(self.sequences(lengths), (), total, float(len(lengths)))


def _write_model(folder: Path, shape: dict[str, int], device: torch.device) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<|end|>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    config = Qwen2Config(**shape, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None)
    torch.manual_seed(1)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to("cpu").save_pretrained(folder)


class NoKeys(BaseModel):
    """The task has no keys of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EvenTokens:
    """Two turns with a remark between; the reward is the share of even token ids, which a policy can learn."""

    def __init__(self, turn_tokens: int) -> None:
        self._turn_tokens = turn_tokens

    @classmethod
    def config_schema(cls) -> type[NoKeys]:
        """Return the empty schema."""
        return NoKeys

    @classmethod
    def from_config(cls, config: RunConfig, tokenizer: Any) -> EvenTokens:
        """Build it; a turn may take half of the response length."""
        return cls(config.data.max_response_length // 2)

    def prompts(self, split: str) -> list[Prompt]:
        """Return 64 short prompts of different length."""
        return [Prompt(f"{split}-{n}", tuple(range(3, 11 + n % 13)), {"n": n}) for n in range(64)]

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to close."""

    def totals(self) -> dict[str, float]:
        """Return no service's figures: there is none."""
        return {}

    async def episode(self, prompt: Prompt, generate: Generate, context: EpisodeContext) -> Trajectory:
        """Generate, add a remark, generate again."""
        segments = [Segment(Origin.PROMPT, prompt.token_ids)]
        for turn in range(2):
            ids = [token for segment in segments for token in segment.token_ids]
            seed = context.seed + turn
            sampling = Sampling(self._turn_tokens, context.temperature, context.top_p, context.top_k, seed=seed)
            completion = await generate.generate(ids, sampling)
            segments.append(Segment(Origin.MODEL, completion.token_ids, completion.logprobs, completion.policy_version))
            if turn == 0:
                segments.append(Segment(Origin.ENV, (7, 9)))
        written = [token for s in segments if s.origin is Origin.MODEL for token in s.token_ids]
        share = sum(token % 2 == 0 for token in written) / max(1, len(written))
        return Trajectory(
            trajectory_id=f"{prompt.prompt_id}#{context.sample_index}",
            prompt_id=prompt.prompt_id,
            segments=tuple(segments),
            stop=StopReason.ANSWERED,
            turns=("search", "answer"),
            reward=Reward(share),
            row=prompt.row,
        )
