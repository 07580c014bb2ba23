#!/bin/bash
# A plan's run on one node of SLURM. Adapt the lines below to the plan (`autotune explain plan.yaml`) and the cluster,
# then: sbatch slurm.sh
#SBATCH --job-name=lora
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=lora-%j.log
set -u
trap : TERM # the run gets it too and writes a checkpoint; this shell waits for it
export XDG_CACHE_HOME="${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/autotune-cache-$(id -u)" # encoded images, on the node's own disk
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"                                 # srun does not take it from the job

# On several nodes, with --nodes=2 above, one task on each and the plan's number of processes in all:
#   head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
#   srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \
#       --rdzv-endpoint "$head:29400" -m autotune train plan.yaml --output lora --resume
# torchrun ends with 1 where `autotune train` ends with 75.
status=0
srun autotune train plan.yaml --data photos --output lora --resume || status=$?
if [ "$status" -eq 75 ]; then # a checkpoint is written: go on from it
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
