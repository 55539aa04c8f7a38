# One image for CPUs and GPUs; the backend of torch is the only difference.
#   docker build -t titan .                                   # CPU: no CUDA libraries
#   docker build -t titan --build-arg TORCH_BACKEND=cu130 .   # CUDA 13.0; needs the NVIDIA container toolkit to run
#   docker run --rm -it --shm-size 8g -v "$PWD/runs:/titan/runs" titan run quickstart
FROM python:3.12-slim
# triton compiles its launchers with gcc; git is what the report asks for the commit
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv
ARG TORCH_BACKEND=cpu
# extras of titan-train, such as ray or ray,tensorboard
ARG EXTRAS=tensorboard
COPY packages /src/packages
# bytecode is compiled here: the user below cannot write it, and every process would compile torch anew
RUN cd /src/packages && uv pip install --system --no-cache --compile-bytecode --torch-backend "${TORCH_BACKEND}" \
    ./titan-mesh ./titan-fsdp ./titan-pipeline ./titan-cp ./titan-fp8 ./titan-ckpt "./titan-train[${EXTRAS}]"
RUN useradd --create-home --home-dir /titan titan
USER titan
WORKDIR /titan
ENTRYPOINT ["titan-train"]
CMD ["--help"]
