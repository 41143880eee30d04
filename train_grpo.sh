#!/usr/bin/env bash
# The published name of: train_ppo.sh --config-name search_r1_grpo (options that follow override it).
#SBATCH --job-name=search-r1-grpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --mem=720G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --output=%x-%j.log
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Slurm runs a copy of this file elsewhere; the checkout is where sbatch was called.
if [ ! -f "$here/scripts/setup.sh" ]; then here=${SLURM_SUBMIT_DIR:-$here}; fi
exec bash "$here/train_ppo.sh" --config-name search_r1_grpo "$@"
