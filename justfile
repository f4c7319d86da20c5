# The daily commands; `just` alone lists them.

bin := justfile_directory() / ".venv/bin"
whole_runs_models_and_kernels := replace(
    " api benchmarks kernels models repository run speculate/drafters speculate/engine", " ", " --ignore=tests/unit/"
)

_list:
    @just --list --unsorted

# install everything that development needs
install:
    ./machine-install.sh --dev
    "{{bin}}/pre-commit" install

# compare plain and speculative sampling on the shipped pair
compare *overrides:
    "{{bin}}/torchrun" --nproc-per-node 2 launch/run.py {{overrides}}

# run the tests, or those that the arguments name
test *arguments:
    "{{bin}}/pytest" {{arguments}}

# run the tests that take less than a minute together on two cores, or those of them that the arguments name
quick *arguments=("tests/unit" + whole_runs_models_and_kernels):
    "{{bin}}/pytest" -m "not (seconds or heavy or slow or distributed)" {{arguments}}

# run the heavy tests: cases in which values meet, and many starts
heavy *arguments:
    "{{bin}}/pytest" --heavy -m heavy {{arguments}}

# the proofs that take long: every signal in every phase, many faults, any command line, models of 1.1 B parameters
slow *arguments:
    "{{bin}}/pytest" --slow -m slow {{arguments}}

# what a GPU would be asked to do, on a stub device; LLAMA_SSP_CUDA_PYTHON names an interpreter with a CUDA build of torch
gpu-stub *arguments:
    "{{bin}}/pytest" --gpu-stub tests/stub_gpu {{arguments}}

# GPU kernels in every variant, compiled ahead of time with the Triton that .ci/run installs
triton *arguments:
    PYTHONPATH="{{justfile_directory()}}/.venv/triton" "{{bin}}/python" -m pytest --slow -m triton tests/extensions/gpu {{arguments}}

# everything that a commit must pass, the tests apart
check:
    "{{bin}}/ruff" check
    "{{bin}}/ruff" format --check
    "{{bin}}/mypy"
    "{{bin}}/lint-imports"
    "{{bin}}/codespell"
    "{{bin}}/hadolint" Dockerfile

# build the documentation into site/; warnings are errors
docs:
    NO_MKDOCS_2_WARNING=1 "{{bin}}/python" -m mkdocs build --strict

# show the documentation while you write it
docs-serve:
    NO_MKDOCS_2_WARNING=1 "{{bin}}/python" -m mkdocs serve

# build the image that Dockerfile describes, with docker or podman; `just image --build-arg NAME=VALUE` passes options on
image *options:
    "$(command -v docker || command -v podman)" build --tag llama-ssp {{options}} "{{justfile_directory()}}"

# mend what can be mended without thought
fix:
    "{{bin}}/ruff" check --fix
    "{{bin}}/ruff" format

# what a change must pass before it is merged; `just ci --heavy` before a release, and for the core
ci *options:
    bash .ci/run {{options}}
