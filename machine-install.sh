#!/usr/bin/env bash
# Makes .venv beside this file and installs torch and llama-ssp into it, on a machine with NVIDIA, AMD or no GPU.
# It changes nothing outside this folder; only as root, and only where Python is missing, it installs that too.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: ./machine-install.sh [--dev] [--deepspeed] [--check] [--help]

Finds the GPUs of this machine, makes .venv, and installs torch and llama-ssp into it. A second run changes nothing.

  --dev         also install what the tests and checks need
  --deepspeed   also install DeepSpeed, built without kernels of its own
  --check       only say what was found and what would be installed

environment:
  PYTHON            the Python to use (3.11 or newer); otherwise python3.11, python3.12, python3.13, python3
  TORCH_INDEX_URL   another index of torch wheels, for example https://download.pytorch.org/whl/rocm7.2
TEXT
}

CPU_INDEX=https://download.pytorch.org/whl/cpu
ROCM_INDEX=https://download.pytorch.org/whl/rocm7.2
STAMP=.venv/machine-install.txt # what this script put into .venv: one line each of root, torch and project

say() { printf '%-8s %s\n' "$1" "$2"; }
fail() {
    printf 'machine-install: %s\n' "$1" >&2
    exit 1
}
venv_works() { .venv/bin/python -c "" 2>/dev/null && { [ ! -e "$STAMP" ] || grep -qxF "root $PWD" "$STAMP"; }; }
remembered() { venv_works && grep -qsxF "$1 $2" "$STAMP"; }
remember() {
    { grep -sv "^$1 " "$STAMP" || true; } >"$STAMP.new"
    echo "$1 $2" >>"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
}

find_python() {
    local candidates=(python3.11 python3.12 python3.13 python3) candidate
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            return 0
        fi
    done
    return 1
}

install_python() {
    [ "$(id -u)" = 0 ] && [ -z "${PYTHON:-}" ] || return 1
    local install packages package
    if command -v apt-get >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq >&2 || true
        install=(apt-get install -y -qq --no-install-recommends)
        packages=(python3-venv python3.12-venv python3.11-venv)
    elif command -v dnf >/dev/null; then
        install=(dnf install -y -q)
        packages=(python3.12 python3.11)
    else
        return 1
    fi
    for package in "${packages[@]}"; do
        say Python "missing: installing the system package $package"
        if "${install[@]}" "$package" >/dev/null 2>&1 && find_python; then return 0; fi
    done
    return 1
}

find_gpu() {
    local names=""
    gpu=none num_gpus=0 gpu_text="none found; everything runs on the CPU"
    if command -v nvidia-smi >/dev/null; then
        if names=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) && [ -n "$names" ]; then
            gpu=nvidia num_gpus=$(wc -l <<<"$names")
            gpu_text="$num_gpus x ${names%%$'\n'*} (NVIDIA)"
            return
        fi
        gpu_text="none: nvidia-smi is here but reaches no GPU (is the driver loaded?); everything runs on the CPU"
    fi
    names=$(rocminfo 2>/dev/null | awk -F': *' '/Marketing Name/ {name = $2} /Device Type: *GPU/ {print name}') || true
    if [ -n "$names" ]; then
        gpu=amd num_gpus=$(wc -l <<<"$names")
        gpu_text="$num_gpus x $(sed -n '1s/ *$//p' <<<"$names") (AMD)"
    elif [ -e /dev/kfd ]; then
        gpu=amd gpu_text="AMD (/dev/kfd; rocminfo is not installed, so they are not counted)"
    fi
}

check_fabric_manager() {
    [ "$gpu" = nvidia ] && [ "$num_gpus" -gt 1 ] || return 0
    grep -Eq '\bNV[0-9]+\b' <<<"$(nvidia-smi topo -m 2>/dev/null)" || return 0
    if systemctl is-active --quiet nvidia-fabricmanager 2>/dev/null || pgrep -x nv-fabricmanager >/dev/null 2>&1; then
        say NVLink "the fabric manager runs"
        return 0
    fi
    local driver install
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader)
    driver=${driver%%$'\n'*}
    install="sudo apt-get install nvidia-fabricmanager-${driver%%.*}"
    if command -v dnf >/dev/null; then install="sudo dnf install nvidia-fabric-manager-$driver"; fi
    say NVLink "the fabric manager does not run. Where the GPUs are joined by NVSwitch, CUDA then stops with"
    say "" '"Error 802: system not yet initialized". These two commands fix it:'
    say "" "    $install"
    say "" "    sudo systemctl enable --now nvidia-fabricmanager"
}

check_disk() {
    local needed=3 free
    [ "$gpu" = none ] || needed=10
    free=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1000000))
    say Disk "$free GB free, $needed GB needed"
    [ "$free" -ge "$needed" ] || fail "the disk of $PWD has $free GB free, but $needed GB are needed; free some, or clone to another disk"
}

reachable() {
    timeout 8 "$python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=4)' "$1/torch/" >/dev/null 2>&1
}

# Without a GPU, the default wheels would bring gigabytes of CUDA along: the CPU index comes first where it can be had.
choose_torch_index() {
    torch_index=${TORCH_INDEX_URL:-}
    if [ -z "$torch_index" ] && [ "$gpu" = amd ]; then torch_index=$ROCM_INDEX; fi
    if [ -z "$torch_index" ] && [ "$gpu" = none ] && reachable "$CPU_INDEX"; then torch_index=$CPU_INDEX; fi
    say torch "$torch_pin from ${torch_index:-the index that pip is set to}"
}

venv_pip() {
    local quiet=()
    [ -t 1 ] || quiet=(--quiet)
    .venv/bin/python -m pip "$@" --disable-pip-version-check "${quiet[@]}" </dev/null
}

# A virtual environment holds absolute paths: one that was moved or copied here is made anew.
make_venv() {
    venv_works || "$python" -m venv --clear .venv
    remember root "$PWD"
}

install_torch() {
    local index=()
    [ -z "$torch_index" ] || index=(--index-url "$torch_index")
    if grep -qs "^torch " "$STAMP"; then venv_pip uninstall --yes torch; fi
    venv_pip install "$torch_pin" "${index[@]}" || {
        [ -n "$torch_index" ] || fail "pip could not install $torch_pin; its own message stands above"
        venv_pip install "$torch_range" "${index[@]}" || fail "$torch_index has no wheel of $torch_range for this Python"
    }
    remember torch "$torch_source"
}

# The resolver must not swap the torch that was just chosen, so the pin becomes that very build; it has its own Triton.
install_project() {
    local version
    version=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')
    { grep -Ev '^(torch|triton)==' constraints.txt && echo "torch==$version"; } >.venv/constraints.txt
    venv_pip install --editable ".$extra" --constraint .venv/constraints.txt ||
        fail "pip could not install llama-ssp; its own message stands above"
    remember project "$project_key$extra"
}

# DeepSpeed is a source package that imports torch while it is built: not in isolation, and without compiling kernels.
install_deepspeed() {
    local pin
    pin=$(grep '^deepspeed==' constraints.txt)
    venv_pip install setuptools wheel || fail "pip could not install setuptools; its own message stands above"
    DS_BUILD_OPS=0 venv_pip install "$pin" --no-build-isolation --constraint .venv/constraints.txt ||
        fail "pip could not install $pin; its own message stands above"
    remember deepspeed "$project_key"
}

main() {
    local check=false deepspeed=false extra="" argument python="" gpu num_gpus gpu_text torch_index
    for argument in "$@"; do
        case $argument in
        --dev) extra="[dev]" ;;
        --deepspeed) deepspeed=true ;;
        --check) check=true ;;
        --help | -h) usage && exit 0 ;;
        *) fail "unknown option $argument; there are --dev, --deepspeed, --check and --help" ;;
        esac
    done
    cd "$(dirname "${BASH_SOURCE[0]}")"
    local torch_pin torch_range torch_source project_key
    torch_pin=$(grep '^torch==' constraints.txt)
    torch_range=$(sed -n 's/^ *"\(torch[<>=][^"]*\)",$/\1/p' pyproject.toml)
    project_key=$(cat pyproject.toml constraints.txt | cksum | tr ' ' -)

    find_python || { ! $check && install_python; } || fail "Python 3.11 or newer with its venv module is needed, and \
${PYTHON:-none} was found; install it (sudo apt-get install python3-venv, or sudo dnf install python3.11), or name one \
with PYTHON=/path/to/python"
    say Python "$("$python" -c 'import platform, sys; print(platform.python_version(), sys.executable)')"
    find_gpu
    say GPU "$gpu_text"
    check_fabric_manager
    torch_source="$torch_pin $gpu ${TORCH_INDEX_URL:-}"

    if $check || ! remembered torch "$torch_source"; then
        check_disk
        choose_torch_index
        if $check; then exit 0; fi
        make_venv
        install_torch
    fi
    if ! remembered project "$project_key$extra" && ! remembered project "${project_key}[dev]"; then
        say project "llama-ssp$extra"
        install_project
        say ready "$(.venv/bin/python -c 'import torch; print(f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")')"
    else
        say ready "everything is in place"
    fi
    if $deepspeed && ! remembered deepspeed "$project_key"; then
        say project "deepspeed"
        install_deepspeed
    fi
    say next "$([ -z "$extra" ] && echo ".venv/bin/torchrun --nproc-per-node 2 launch/run.py" || echo ".venv/bin/pytest")"
}

main "$@"
