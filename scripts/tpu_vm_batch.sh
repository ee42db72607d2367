#!/usr/bin/env bash
# Starts one batch on all workers of a TPU VM that is there: creates nothing, deletes nothing.
#
#     scripts/tpu_vm_batch.sh NAME ZONE --input gs://BUCKET/prompts.jsonl \
#         --output gs://BUCKET/out.jsonl [more options of entropix-jax batch]
#
# Each worker has the repository in ENTROPIX_DIR (default: entropix_jax, in the home folder), with
# its environment in .venv. Needs gcloud, logged in. Started again it goes on where it was.
set -euo pipefail

if [[ $# -lt 2 || $1 == -* || $2 == -* ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
name=$1 zone=$2
shift 2
printf -v options ' %q' "$@"
folder=${ENTROPIX_DIR:-entropix_jax}
printf -v folder '%q' "${folder#\~/}" # a relative path begins in the home folder, too
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all \
    --command "cd $folder && .venv/bin/python -m entropix_jax batch --distributed$options"
