#!/usr/bin/env bash
# Builds both images, then trains a federation of a coordinator and three hospitals, each in a hardened container of its
# own on a bridge network without a way out. Leaves nothing behind but the images flwr-server:smoke, flwr-client:smoke.
#
#   ENGINE        docker or podman; found by itself
#   BASE_IMAGE    Debian or like it with python3 and venv; python:3.12-slim by default
#   GPU           1: images with CUDA; 0 by default
#   TORCH_INDEX   a copy of the index of torch for CPUs; download.pytorch.org by default
#   ENGINE_ARGS   before every command, e.g. "--runtime runc"
#   BUILD_ARGS    for the builds, e.g. "--secret id=pip.conf,src=..."
#   RUN_ARGS      for every container, e.g. "--ulimit nofile=10000:10000"
#   WAIT_S        seconds that a container may take to be ready (120); the training may take five times as long
# Words in the last four are split at spaces. Exit code 0: all checks passed; else the container's log is printed.
#
# Where no base image can be pulled, make one, and say what the engine may not do (Debian, as root, Podman 4.3):
#   apt-get install podman buildah runc netavark aardvark-dns iptables catatonit debootstrap
#   debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm rootfs
#   tar -C rootfs -c . | podman import - localhost/debian-python:bookworm
#   BASE_IMAGE=localhost/debian-python:bookworm ENGINE_ARGS="--runtime runc" \
#     BUILD_ARGS="--isolation=chroot --secret id=pip.conf,src=pip.conf --secret id=ca.crt,src=ca.crt" \
#     RUN_ARGS="--ulimit nofile=10000:10000 --ulimit nproc=10000:10000" make smoke
set -euo pipefail
cd "$(dirname "$0")/.."

ENGINE=${ENGINE:-$(if docker info >/dev/null 2>&1; then echo docker; else echo podman; fi)}
command -v "$ENGINE" >/dev/null || { echo "neither docker nor podman is here; set ENGINE" >&2; exit 2; }
read -ra engine_args <<<"${ENGINE_ARGS:-}"
read -ra build_args <<<"${BUILD_ARGS:-}"
read -ra run_args <<<"${RUN_ARGS:-}"
WAIT_S=${WAIT_S:-120}
ID=polyclinic-smoke-$$
scratch=$(mktemp)
SITES=(north east south)
IMAGES=(flwr-server:smoke flwr-client:smoke)

# The walls of compose.yaml.
hardened=(--read-only --tmpfs "/tmp:rw,noexec,nosuid,nodev,size=512m" --cap-drop ALL --security-opt no-new-privileges
    --pids-limit 512)
export DOCKER_BUILDKIT=1  # the default from Docker 23 on
if [[ $ENGINE == *podman* ]]; then
    export DISABLE_HC_SYSTEMD=true  # health checks are asked for here; without systemd nobody else would
    build_args+=(--format docker)   # the OCI format knows no health check
    hardened+=(--read-only-tmpfs=false)  # or /run and /var/tmp could be written
fi

engine() { "$ENGINE" "${engine_args[@]}" "$@"; }
step() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
fail() {  # MESSAGE [CONTAINER...], whose logs are shown
    printf 'FAILED after %d s: %s\n' "$SECONDS" "$1" >&2
    for name in "${@:2}"; do
        printf -- '---- log of %s\n' "$name" >&2
        engine logs --tail 60 "$ID-$name" >&2 || true
    done
    exit 1
}
quietly() { "$@" >"$scratch" 2>&1 || { cat "$scratch" >&2; return 1; }; }  # output only where it fails
# One command in a container that is gone afterwards: once VOLUME ENTRYPOINT [ARGUMENT...]; reads stdin.
once() {
    local volume=$1 program=$2 image=${IMAGES[0]}
    [[ $program != flwr-client ]] || image=${IMAGES[1]}
    engine run --rm --interactive --label "smoke=$ID" --network none "${hardened[@]}" "${run_args[@]}" \
        --volume "$ID-$volume:/data" --entrypoint "$program" "$image" "${@:3}"
}
# What a person does with a file and a mail: carry VOLUME PATH VOLUME PATH.
carry() { once "$1" cat "/data/$2" </dev/null | once "$3" sh -c "cat > /data/$4"; }
serve() {  # NAME IMAGE [OPTION...]: start it, as the image says
    local name=$1 image=$2
    engine run --detach --name "$ID-$name" --label "smoke=$ID" --network "$ID" --network-alias "$name" \
        "${hardened[@]}" "${run_args[@]}" --volume "$ID-$name:/data" "${@:3}" "$image" >/dev/null
}
inside() { engine exec "$ID-$1" "${@:2}"; }
health() {
    if [[ $ENGINE == *podman* ]]; then
        engine healthcheck run "$ID-$1" >/dev/null 2>&1
    else
        [[ $(engine inspect --format '{{.State.Health.Status}}' "$ID-$1") == healthy ]]
    fi
}
running() { [[ $(engine inspect --format '{{.State.Running}}' "$ID-$1") == true ]]; }
await_health() {
    local deadline=$((SECONDS + WAIT_S))
    until health "$1"; do
        running "$1" || fail "$1 ended" "$1"
        ((SECONDS < deadline)) || fail "$1 is not healthy after $WAIT_S s" "$1"
        sleep 1
    done
}
ours() {
    engine ps --all --quiet --filter "label=smoke=$ID"
    engine volume ls --quiet --filter "label=smoke=$ID"
    engine network ls --quiet --filter "label=smoke=$ID"
}
remove_all() {
    local one
    for one in $(engine ps --all --quiet --filter "label=smoke=$ID"); do engine rm --force --volumes "$one"; done
    for one in $(engine volume ls --quiet --filter "label=smoke=$ID"); do engine volume rm "$one"; done
    for one in $(engine network ls --quiet --filter "label=smoke=$ID"); do engine network rm "$one"; done
}
at_end() {
    local code=$?
    trap - EXIT
    set +e
    ((code == 0)) || printf 'stopped with %d; removing what was started\n' "$code" >&2
    remove_all >/dev/null
    rm -f "$scratch"
    local left
    left=$(ours)
    [[ -z $left ]] || { printf 'FAILED: left behind: %s\n' "$left" >&2; code=1; }
    ((code != 0)) || step "passed; no container, volume or network is left"
    exit "$code"
}
trap at_end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ---------------------------------------------------------------- images

for target in server client; do
    began=$SECONDS
    quietly engine build --file docker/Dockerfile --target $target --tag flwr-$target:smoke \
        ${BASE_IMAGE:+--build-arg BASE_IMAGE="$BASE_IMAGE"} ${TORCH_INDEX:+--build-arg TORCH_INDEX="$TORCH_INDEX"} \
        --build-arg GPU="${GPU:-0}" \
        "${build_args[@]}" . || fail "flwr-$target is not built"
    size=$(engine image inspect --format '{{.Size}}' flwr-$target:smoke)
    step "built flwr-$target:smoke in $((SECONDS - began)) s, $((size / 1000000)) MB"
done

# What a hospital's image must not hold: the coordinator's code and commands, installers, compilers; CUDA unless asked.
holds() {  # FIND'S EXPRESSION: what the image has of it; not all folders are open to its user
    engine run --rm --label "smoke=$ID" --network none "${hardened[@]}" "${run_args[@]}" \
        --entrypoint find flwr-client:smoke / -xdev -path /proc -prune -o \( "$@" \) -print 2>/dev/null || true
}
[[ -n $(holds -path '*/polyclinic/client/cli.py') ]] || fail "flwr-client:smoke cannot be looked into"
unwanted=$(holds -path '*/polyclinic/server' -o -path '*/polyclinic/studies' -o -path '*/bin/flwr-server' \
    -o -path '*/bin/flwr-sim' -o -path '*/bin/pip*' -o -path '*-packages/pip' -o -path '*/bin/uv' -o -name ensurepip \
    -o -name 'pip-*.whl' -o -path '*/bin/*gcc*' -o -path '*/bin/cc' -o -path '*/bin/make' -o -path '*/torch/include')
[[ -z $unwanted ]] || fail "flwr-client:smoke holds $unwanted"
if [[ ${GPU:-0} != 1 ]]; then
    cuda=$(holds -name 'libcudart*' -o -name 'libcublas*')
    [[ -z $cuda ]] || fail "flwr-client:smoke holds CUDA: $cuda"
fi
step "flwr-client holds nothing of the coordinator's, no installer and no compiler"

# ---------------------------------------------------------------- first day

engine network create --internal --label "smoke=$ID" "$ID" >/dev/null
for name in coordinator "${SITES[@]}" exported "${SITES[@]/#/images-}"; do
    engine volume create --label "smoke=$ID" "$ID-$name" >/dev/null
done
once exported sh -c 'cat > /data/digits.toml' <<'TOML'
[run]
method = "surgical"
rounds = 2
[model]
architecture = "tiny_cnn"
channels = 1
image_size = 16
[training]
batch_size = 64
lr = 3e-3
[data]
kind = "digits"
image_size = 16
[partition]
kind = "class_lists"
[partition.lists]
north = ["0", "1", "2", "3"]
east = ["0", "1", "4", "5", "6"]
south = ["0", "1", "7", "8", "9"]
TOML
once exported flwr-sim sites /data/digits.toml --out /data/sites </dev/null >/dev/null
once coordinator flwr-server init /data --name trial --host coordinator --host 127.0.0.1 </dev/null >/dev/null
for site in "${SITES[@]}"; do
    carry exported "sites/$site/images.npz" "images-$site" images.npz
    once exported sed 's|"images.npz"|"/images/images.npz"|' "/data/sites/$site/site.toml" </dev/null |
        once "$site" sh -c 'cat > /data/site.toml'
    once "$site" flwr-client init /data --name "$site" </dev/null >/dev/null
    carry "$site" "$site.request" coordinator "$site.request"
done
step "made a coordinator's folder and three hospitals' keys and images"

for site in north east; do  # before the coordinator is up
    once coordinator flwr-server admit /data "/data/$site.request" --yes </dev/null >/dev/null
done
serve coordinator flwr-server:smoke
await_health coordinator
once coordinator flwr-server admit /data /data/south.request --yes </dev/null >/dev/null  # while it is up
for site in "${SITES[@]}"; do
    carry coordinator "kits/$site.kit" "$site" "$site.kit"
    serve "$site" flwr-client:smoke --volume "$ID-images-$site:/images:ro"
done
for site in "${SITES[@]}"; do await_health "$site"; done
step "the coordinator and three admitted hospitals are up and healthy"

# ---------------------------------------------------------------- walls

for name in coordinator "${SITES[@]}"; do
    rights=$(inside "$name" awk '/^(Uid|Gid|CapEff|CapBnd|NoNewPrivs):/ { print $1 $2 }' /proc/1/status | tr '\n' ' ')
    [[ $rights == "Uid:10001 Gid:10001 CapEff:0000000000000000 CapBnd:0000000000000000 NoNewPrivs:1 " ]] ||
        fail "$name has other rights than it should: $rights" "$name"
    open=$(inside "$name" find / \( -path /proc -o -path /sys -o -path /dev -o -path /data -o -path /tmp \) -prune \
        -o \( -type d -o -type f \) -writable -print 2>/dev/null | head -5) || true
    [[ -z $open ]] || fail "$name can write to: $open" "$name"
    inside "$name" sh -c 'touch /data/.probe /tmp/probe && rm /data/.probe /tmp/probe' ||
        fail "$name cannot write to /data or /tmp" "$name"
done
step "all run as 10001:10001 without capabilities, and write to /data and /tmp only"

reaches() {  # CONTAINER HOST PORT
    inside "$1" /opt/polyclinic/bin/python -c \
        'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)' "$2" "$3" 2>/dev/null
}
for site in "${SITES[@]}"; do
    reaches "$site" coordinator 9092 || fail "$site does not reach port 9092" coordinator
done
# What listens in a container: /proc/net/tcp and tcp6, column 2 is the address with its port (hex), 0A is LISTEN.
listening() { inside "$1" awk '$4 == "0A" { print $2 }' /proc/net/tcp /proc/net/tcp6 | sed 's/.*://' | sort -u | tr '\n' ' '; }
[[ $(listening coordinator) == "$(printf '%04X ' 9092)" ]] || fail "the coordinator listens on other ports too" coordinator
for site in "${SITES[@]}"; do [[ -z $(listening "$site") ]] || fail "$site listens on a port" "$site"; done
step "hospitals reach port 9092, the only one that the coordinator listens on; they themselves listen on none"

# ---------------------------------------------------------------- training

carry exported digits.toml coordinator digits.toml
began=$SECONDS
quietly timeout $((5 * WAIT_S)) "$ENGINE" "${engine_args[@]}" exec "$ID-coordinator" \
    flwr-server run /data /data/digits.toml --out /data/run --sites 3 ||
    fail "flwr-server run" coordinator "${SITES[@]}"
step "trained two rounds over three containers in $((SECONDS - began)) s"

inside coordinator test -s /data/run/model.safetensors || fail "the run folder has no model" coordinator
sites=$(inside coordinator /opt/polyclinic/bin/python -c \
    'import json; print(*sorted(json.load(open("/data/run/summary.json"))["sites"]))') ||
    fail "the run folder has no summary of sites" coordinator
[[ $sites == "east north south" ]] || fail "summary.json names these sites: $sites" coordinator
for name in coordinator "${SITES[@]}"; do health "$name" || fail "$name is not healthy after the run" "$name"; done
step "the run folder has a model and a summary of east, north and south; all are healthy"

for name in "${SITES[@]}" coordinator; do
    engine stop -t 30 "$ID-$name" >/dev/null
    code=$(engine inspect --format '{{.State.ExitCode}}' "$ID-$name")
    [[ $code == 0 ]] || fail "$name ended with $code when it was told to stop" "$name"
done
step "all stopped with exit code 0 on SIGTERM"
