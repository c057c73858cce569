#!/bin/bash
# A simulation on the nodes of a Slurm job: one node of Ray on each machine, the coordinator on the first.
#
#     sbatch --nodes 4 slurm.sh experiment.toml runs/first [--set key=value ...]
#
# Submitted again after a time limit or a failure, it goes on with the last round that counted.
#SBATCH --job-name=polyclinic
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=3G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@60
##SBATCH --gpus-per-node=1

set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: sbatch slurm.sh EXPERIMENT.toml RUN_FOLDER [--set key=value ...]" >&2
    exit 2
fi
experiment=$1 out=$2
shift 2
bin=${POLYCLINIC_BIN:-$(dirname "$(command -v flwr-sim)")}
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1
# Ray runs code for everybody who reaches its ports and has this: the job's nodes get it from srun, nobody else.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):$port

# A node of Ray takes the cores that Slurm gave to the job, not all that the machine has.
start() { # node, then arguments of "ray start"
    local node=$1
    shift
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" \
        "$bin/ray" start "$@" --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --block &
}

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
start "$head" --head --port="$port" --node-ip-address="${address%:*}" --include-dashboard=false
until "$bin/ray" status --address "$address" >/dev/null 2>&1; do sleep 1; done
for node in "${nodes[@]:1}"; do
    start "$node" --address="$address"
done
# All nodes, so that all count when the run chooses how many sites train at a time; after some minutes those that came.
for ((look = 0; look < 60; look++)); do
    [ "$("$bin/ray" status --address "$address" 2>/dev/null | grep -c ' node_')" -ge "${#nodes[@]}" ] && break
    sleep 2
done

resume=()
if [ -e "$out/events.jsonl" ]; then resume=(--resume); fi
srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
    "$bin/flwr-sim" run "$experiment" --out "$out" --backend ray \
    --set "simulation.address=$address" --progress lines "${resume[@]}" "$@" &
run=$!
# Before the time limit Slurm sends TERM to this script alone: it ends the run, and with it the nodes.
trap 'kill -TERM "$run" 2>/dev/null' TERM
code=0
while kill -0 "$run" 2>/dev/null; do wait "$run" && code=0 || code=$?; done
exit "$code"
