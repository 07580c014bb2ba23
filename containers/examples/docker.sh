#!/bin/sh
# A plan's run in a container on this machine, from the folder that holds plan, data and output. `docker stop lora` ends
# a start with a checkpoint and status 75; the next start goes on from it. Ctrl-C ends the loop as well.
trap exit INT
status=75
while [ "$status" -eq 75 ]; do
    status=0
    docker run --rm --name lora --gpus all --shm-size 1g --stop-timeout 180 \
        --volume "$PWD:/work" --volume huggingface:/cache/huggingface --volume autotune:/cache/autotune \
        --user "$(id -u)" autotune:1 train plan.yaml --data photos --output lora --resume || status=$?
done
exit "$status"
