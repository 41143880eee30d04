"""Supervised training from the command line.

python -m verl.trainer.main_sft data.train_files=FILE model.partial_pretrain=FOLDER trainer.default_local_dir=OUT

Rows and keys: ``configs/sft_trainer.yaml``. Under ``torchrun --nproc-per-node N`` the same command trains on N ranks.
The last line printed is the path of the exported model. ``--check`` shows the resolved configuration and stops.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

from verl.config import load_sft_config
from verl.errors import ChatR1Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with ``key=value`` arguments; returns the exit status (2 for a mistake of the user)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "transformers", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    name = "sft_trainer"
    if "--config-name" in given:
        position = given.index("--config-name")
        name = "".join(given[position + 1 : position + 2])
        del given[position : position + 2]
    check = "--check" in given
    try:
        config = load_sft_config(name, [argument for argument in given if argument != "--check"])
        if check:
            sys.stdout.write(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
            return 0
        return _train(config)
    except ChatR1Error as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _train(config: object) -> int:
    # Imported here so that --check and configuration mistakes need no torch.
    from verl.config import SftConfig
    from verl.trainer.sft import SftTrainer, summary
    from verl.workers.device import close_device, seed_everything, setup_device

    assert isinstance(config, SftConfig)
    device = setup_device(config.trainer.threads or None)
    try:
        seed_everything(config.trainer.seed)
        result = SftTrainer(config, device).run()
    finally:
        close_device()
    if device.is_main:
        logging.getLogger(__name__).info("%s", json.dumps(summary(result)))
        sys.stdout.write(f"{result.export}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
