#!/usr/bin/env bash
# The main job: sets up, prepares data and retrieval, trains, evaluates before and after, reports.
#   bash train_ppo.sh [--check] [--config-name NAME] key.path=value ...
#   sbatch --gpus-per-node=4 train_ppo.sh --config-name chatr1_3b_topiocqa
#   sbatch --nodes=2 --gpus-per-node=4 train_ppo.sh --config-name chatr1_3b_topiocqa trainer.nnodes=2
# Run it again and an interrupted run goes on; beside a finished one a new numbered run begins.
#SBATCH --job-name=chatr1-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=128G
#SBATCH --time=12:00:00
#SBATCH --requeue
# Five minutes before the limit: save, and back into the queue. SIGTERM (preemption, scancel) saves and ends.
#SBATCH --signal=B:USR1@300
#SBATCH --output=%x-%j.log
set -euo pipefail
CHATR1_STARTED=$(date +%s)
export CHATR1_STARTED
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Slurm runs a copy of this file elsewhere; the checkout is where sbatch was called.
if [ ! -f "$here/scripts/setup.sh" ]; then here=${SLURM_SUBMIT_DIR:-$here}; fi
if [ ! -f "$here/scripts/setup.sh" ]; then echo "train_ppo.sh: run sbatch from the folder of the checkout" >&2; exit 2; fi
bash "$here/scripts/setup.sh"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$here/.venv/bin/python" "$here/scripts/job.py" train "$@"
