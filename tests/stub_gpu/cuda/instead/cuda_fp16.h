// Instead of CUDA's header, which needs one of libcu++ that no wheel brings: cuBLAS and NCCL need the name alone.
#pragma once
struct __half;
