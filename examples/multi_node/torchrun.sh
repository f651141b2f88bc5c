#!/usr/bin/env bash
# One training run over several machines: start this on each of them, with the same values.
#
#   HEAD=node0 NODES=2 PER_NODE=8 ./torchrun.sh train --name big --parallel.shard 16 --recipe narrow8
#
# HEAD       name or address of one of the machines, which all others reach; PORT of it is free
# NODES      number of machines
# PER_NODE   processes on each: one for each GPU, or one for each socket of a CPU
# JOB        a name for this run, another one for each: after a restart `train` goes on with what it has begun
# RESTARTS   how often torchrun starts all processes anew after one of them has failed
# ADDRESS    this machine's own address, where its name does not lead the others to it; HEAD is then an address, too
#
# The run's folder (--runs_dir, by default runs/) must be one that all machines see. On CPUs with several networks
# GLOO_SOCKET_IFNAME names the one to take, on GPUs NCCL_SOCKET_IFNAME.
set -euo pipefail
: "${HEAD:?the name or address of one machine, the same on all}"
: "${NODES:?the number of machines}"
: "${PER_NODE:=1}" "${PORT:=29400}" "${RESTARTS:=3}" "${JOB:=narrowgauge}"

own=()
if [ -n "${ADDRESS:-}" ]; then
    own=(--local-addr "$ADDRESS" --rdzv-conf "is_host=$([ "$ADDRESS" = "$HEAD" ] && echo true || echo false)")
fi
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec torchrun \
    --nnodes "$NODES" \
    --nproc-per-node "$PER_NODE" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:$PORT" \
    --rdzv-id "$JOB" \
    --max-restarts "$RESTARTS" \
    "${own[@]}" \
    -m narrowgauge "$@"
