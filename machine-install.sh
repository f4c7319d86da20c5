#!/usr/bin/env bash
# Makes .venv beside this file and installs torch and llama-ssp into it, on a machine with NVIDIA, AMD or no GPU.
# It changes nothing outside this folder; only as root, and only where Python is missing, it installs that too.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: ./machine-install.sh [--dev] [--deepspeed] [--check] [--help]

Finds the GPUs of this machine and what their driver runs, makes .venv, installs torch and llama-ssp into it, and
computes on each GPU. A second run changes nothing.

  --dev         also install what the tests and checks need
  --deepspeed   also install DeepSpeed, built without kernels of its own
  --check       only say what was found and what would be installed

environment:
  PYTHON            the Python to use (3.11 or newer); otherwise python3.11, python3.12, python3.13, python3
  TORCH_INDEX_URL   another index of torch wheels, for example https://download.pytorch.org/whl/rocm7.2
TEXT
}

WHEELS=https://download.pytorch.org/whl
STAMP=.venv/machine-install.txt # what this script put into .venv: one line each of root, torch, project and computes

# Drivers that run CUDA 12 and CUDA 13, whatever the minor version:
# docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1.
FIRST_DRIVER_OF_CUDA_12=525
FIRST_DRIVER_OF_CUDA_13=580
# GPUs that a wheel has kernels for, by 10 x compute capability: for CUDA 12.6 up to 90, for 12.8 and 13.0 from 75 to 120.
# The last torch with a wheel for CUDA 12.8 is 2.11: RELEASE.md of github.com/pytorch/pytorch, and its issue 178665.
LEAST_OF_CUDA_13=75
MOST_OF_CUDA_12_6=90

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

ask_nvidia_smi() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null; }

# Containers often have the driver's library without nvidia-smi. Prints what CUDA it runs, then a line for each GPU.
ask_libcuda() {
    "$python" - <<'PYTHON' 2>/dev/null
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
number, name = ctypes.c_int(), ctypes.create_string_buffer(100)
if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(number)):
    raise SystemExit(1)
print(number.value // 1000)
cuda.cuDeviceGetCount(ctypes.byref(number))
for index in range(number.value):
    cuda.cuDeviceGetName(name, 100, index)
    capability = []
    for attribute in (75, 76):  # major and minor
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, index)
        capability.append(str(number.value))
    print(".".join(capability), name.value.decode())
PYTHON
}

# Sets names and capabilities, a line for each GPU, and the driver with the newest CUDA that it runs.
find_nvidia() {
    local answer
    if command -v nvidia-smi >/dev/null; then
        if ! names=$(ask_nvidia_smi name) || [ -z "$names" ]; then
            gpu_text="none: nvidia-smi is here but reaches no GPU (is the driver loaded?); everything runs on the CPU"
            return 1
        fi
        capabilities=$(ask_nvidia_smi compute_cap) || capabilities=""
        driver=$(ask_nvidia_smi driver_version)
        driver=${driver%%$'\n'*}
        driver_cuda=11
        [ "${driver%%.*}" -lt $FIRST_DRIVER_OF_CUDA_12 ] || driver_cuda=12
        [ "${driver%%.*}" -lt $FIRST_DRIVER_OF_CUDA_13 ] || driver_cuda=13
    else
        answer=$(ask_libcuda) || return 1
        driver="(version unknown: nvidia-smi is not installed)"
        driver_cuda=${answer%%$'\n'*}
        answer=$(sed 1d <<<"$answer")
        [ -n "$answer" ] || return 1
        capabilities=$(awk '{ print $1 }' <<<"$answer")
        names=$(awk '{ sub(/^[^ ]* /, ""); print }' <<<"$answer")
    fi
}

# Chooses the wheel by the driver and by the oldest and the newest GPU; sets cuda, or gpu=none if no wheel can serve.
choose_cuda() {
    local least most needed="$FIRST_DRIVER_OF_CUDA_12 or newer for CUDA 12, $FIRST_DRIVER_OF_CUDA_13 or newer for CUDA 13"
    if [ "$driver_cuda" -lt 12 ]; then
        gpu=none
        say Driver "$driver is too old for this torch, which needs $needed. Everything runs on the CPU: update the"
        say "" "driver, and run this script again"
        return
    fi
    read -r least most < <(awk -F. '
        NF == 2 { now = 10 * $1 + $2; if (!known++ || now < least) least = now; if (now > most) most = now }
        END { print (known ? least : 80), (known ? most : 80) }' <<<"$capabilities")
    if [ "$least" -lt $LEAST_OF_CUDA_13 ]; then
        cuda=12.6
    elif [ "$driver_cuda" -gt 12 ]; then
        cuda=13.0
    elif [ "$most" -gt $MOST_OF_CUDA_12_6 ]; then
        cuda=12.8
    else
        cuda=12.6
    fi
    say Driver "$driver runs CUDA $driver_cuda; torch for CUDA $cuda serves it"
}

find_gpu() {
    local names="" capabilities="" driver="" driver_cuda=""
    gpu=none num_gpus=0 gpu_text="none found; everything runs on the CPU"
    if find_nvidia; then
        gpu=nvidia num_gpus=$(wc -l <<<"$names")
        say GPU "$num_gpus x ${names%%$'\n'*} (NVIDIA)"
        choose_cuda
        return
    fi
    names=$(rocminfo 2>/dev/null | awk -F': *' '/Marketing Name/ {name = $2} /Device Type: *GPU/ {print name}') || true
    if [ -n "$names" ]; then
        gpu=amd num_gpus=$(wc -l <<<"$names")
        gpu_text="$num_gpus x $(sed -n '1s/ *$//p' <<<"$names") (AMD)"
    elif [ -e /dev/kfd ]; then
        gpu=amd gpu_text="AMD (/dev/kfd; rocminfo is not installed, so they are not counted)"
    fi
    say GPU "$gpu_text"
}

# Triton compiles a launcher for each of its kernels: with gcc or clang, and with the headers of this Python.
check_compiler() {
    [ "$gpu" != none ] || return 0
    local packages=() version command="sudo apt-get install"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    command -v "${CC:-gcc}" >/dev/null || { [ -z "${CC:-}" ] && command -v clang >/dev/null; } || packages+=(gcc)
    "$python" -c 'import os, sysconfig as s; open(os.path.join(s.get_path("include", "posix_prefix"), "Python.h"))' \
        2>/dev/null || packages+=("python$version-dev")
    [ ${#packages[@]} -gt 0 ] || return 0
    if command -v dnf >/dev/null; then
        command="sudo dnf install"
        packages=("${packages[@]/%-dev/-devel}")
    fi
    say Triton "lacks a C compiler or Python.h. Runs go on without them, but int8_weight_only is then slower than fp16,"
    say "" "and layers launch more kernels. This command installs them:"
    say "" "    $command ${packages[*]}"
}

check_fabric_manager() {
    [ "$gpu" = nvidia ] && [ "$num_gpus" -gt 1 ] || return 0
    grep -Eq '\bNV[0-9]+\b' <<<"$(nvidia-smi topo -m 2>/dev/null)" || return 0
    local state driver install
    # In a container systemd does not answer, and the processes of the host are not seen.
    state=$(systemctl is-active nvidia-fabricmanager 2>/dev/null || true)
    if [ "$state" = active ] || pgrep -x nv-fabricmanager >/dev/null 2>&1; then
        say NVLink "the fabric manager runs"
        return 0
    fi
    if [ -z "$state" ]; then
        say NVLink "systemd does not answer here, as in a container: the host must run the fabric manager for NVSwitch"
        return 0
    fi
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
    # Other indexes may have builds for GPUs alone, which bring CUDA along.
    [ "$gpu" != none ] || [ -n "$torch_index" ] || needed=6
    [ "$gpu" = none ] || needed=10
    free=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1000000))
    say Disk "$free GB free, $needed GB needed"
    [ "$free" -ge "$needed" ] || fail "the disk of $PWD has $free GB free, but $needed GB are needed; free some, or clone to another disk"
}

reachable() {
    timeout 8 "$python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=4)' "$1/torch/" >/dev/null 2>&1
}

# The index of wheels for what was found, where it can be had. The default wheels of pip's own index are for CUDA 13 on
# most machines, and without a GPU they would bring gigabytes of CUDA along.
choose_torch_index() {
    local index
    case $gpu in
    amd) index=$WHEELS/rocm7.2 ;;
    nvidia) index=$WHEELS/cu${cuda/./} ;;
    none) index=$WHEELS/cpu ;;
    esac
    torch_index=${TORCH_INDEX_URL:-}
    if [ -z "$torch_index" ] && { [ "$gpu" = amd ] || reachable "$index"; }; then torch_index=$index; fi
    say torch "$torch_wanted from ${torch_index:-the index that pip is set to}"
    if [ -z "$torch_index" ] && [ "$gpu" = nvidia ] && [ "$cuda" != 13.0 ]; then
        say "" "$index is out of reach, and another index may give a wheel for CUDA 13, which"
        say "" "does not serve this machine: TORCH_INDEX_URL=URL names a mirror"
    fi
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
    venv_pip install "$torch_wanted" "${index[@]}" || {
        [ -n "$torch_index" ] || fail "pip could not install $torch_wanted; its own message stands above"
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

# The count of GPUs comes from the driver, and says nothing about this build of torch: each GPU must compute.
compute_on_gpus() {
    [ "$gpu" = none ] || .venv/bin/python launch/check_gpus.py "$num_gpus" ||
        fail "torch was installed, but does not compute on every GPU: the lines above say why"
    remember computes "$torch_source"
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
    local check=false deepspeed=false extra="" argument python="" gpu num_gpus gpu_text cuda="" torch_index
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
    local torch_pin torch_wanted torch_range torch_source project_key
    torch_pin=$(grep '^torch==' constraints.txt)
    torch_range=$(sed -n 's/^ *"\(torch[<>=][^"]*\)",$/\1/p' pyproject.toml)
    project_key=$(cat pyproject.toml constraints.txt | cksum | tr ' ' -)

    local found="none was found"
    [ -z "${PYTHON:-}" ] || found="PYTHON=$PYTHON is none"
    find_python || { ! $check && install_python; } || fail "Python 3.11 or newer with its venv module is needed, and \
$found; install it (sudo apt-get install python3-venv, or sudo dnf install python3.11), or name one \
with PYTHON=/path/to/python"
    say Python "$("$python" -c 'import platform, sys; print(platform.python_version(), sys.executable)')"
    find_gpu
    check_fabric_manager
    check_compiler
    # The formats int8 and nf4 need bitsandbytes on GPUs, and CPUs compute faster with llvmlite.
    if [ -z "$extra" ]; then extra=$([ "$gpu" = none ] && echo "[cpu]" || echo "[bitsandbytes]"); fi
    torch_source="$torch_pin $gpu$cuda ${TORCH_INDEX_URL:-}"
    torch_wanted=$torch_pin
    if [ "$cuda" = 12.8 ]; then torch_wanted=$torch_range; fi

    if $check || ! remembered torch "$torch_source"; then
        choose_torch_index
        check_disk
        if $check; then exit 0; fi
        make_venv
        install_torch
    fi
    if ! remembered project "$project_key$extra" && ! remembered project "${project_key}[dev]"; then
        say project "llama-ssp$extra"
        install_project
        say ready "$(.venv/bin/python -c 'import torch; print(f"torch {torch.__version__}")')"
    else
        say ready "everything is in place"
    fi
    remembered computes "$torch_source" || compute_on_gpus
    if $deepspeed && ! remembered deepspeed "$project_key"; then
        say project "deepspeed"
        install_deepspeed
    fi
    say next "$([ "$extra" = "[dev]" ] && echo ".venv/bin/pytest" || echo ".venv/bin/llama-ssp run ranks=2")"
}

main "$@"
