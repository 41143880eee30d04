#!/usr/bin/env bash
# The published name of: eval.sh on TopiOCQA, with the four turns it evaluates with (name the model: model.path=FOLDER).
#SBATCH --job-name=chatr1-eval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=360G
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Slurm runs a copy of this file elsewhere; the checkout is where sbatch was called.
if [ ! -f "$here/scripts/setup.sh" ]; then here=${SLURM_SUBMIT_DIR:-$here}; fi
exec bash "$here/eval.sh" --config-name chatr1_3b_topiocqa max_turns=4 data.max_prompt_length=4096 "$@"
