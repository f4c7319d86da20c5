// Instead of CUDA's header; see cuda_fp16.h.
#pragma once
struct __nv_bfloat16;
