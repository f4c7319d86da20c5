"""The private names of torch and transformers that the package uses, with the reason or the fallback of each.

A private name may change in any release. Where one is gone, tests/unit/repository/test_structure.py says so.
"""

_TRACING = "traces without torch.jit.trace, which never frees them; without it rounds run from Python, with a warning"
_ATTENTION = "transformers has no public getter of the attention that a model was built with"

PRIVATE_NAMES = {
    "torch._C.CompilationUnit": _TRACING,
    "torch._C.ScriptModule": _TRACING,
    "torch._C.ScriptModule._register_attribute": _TRACING,
    "torch._C._create_function_from_graph": _TRACING,
    "torch._C._create_graph_by_tracing": _TRACING,
    "torch._C._get_graph_executor_optimize": _TRACING,
    "torch._C._jit_pass_constant_pooling": _TRACING,
    "torch._C._jit_try_infer_type": _TRACING,
    "torch._C._set_graph_executor_optimize": _TRACING,
    "torch.distributed.ProcessGroup._get_backend": "finds NCCL's own timeout, on GPUs alone",
    "torch.distributed.ProcessGroupGloo._set_default_timeout": "NCCL's has no public setter; gloo's is in every build",
    "torch.distributed.distributed_c10d._get_default_store": "the store of the started ranks has no public name",
    "torch.distributed.distributed_c10d._set_pg_timeout": "a group's timeout has no public setter",
    "torch.ops.aten._flash_attention_forward": "flash attention by lengths; without it masks are used, with a warning",
    "torch.ops.mkldnn._linear_pointwise": "oneDNN's packed product; without it torch's plain product is taken",
    "torch.ops.mkldnn._reorder_linear_weight": "packs a weight for it",
    "transformers.PretrainedConfig._attn_implementation": _ATTENTION,
    "transformers.PretrainedConfig._experts_implementation": "the grouped products of Llama 4's experts",
    "transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextMLP._gaussian_topk": "replaced: it sees one rank's units",
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention._attn": "replaced: it slices masks of its own",
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts._apply_gate": "the gate of experts, by family",
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected": "tensors that a family leaves unread on purpose",
    "transformers.PreTrainedModel._supports_sdpa": "whether a family without a record has torch's attention",
    "transformers.PreTrainedModel._skip_keys_device_placement": "accelerate's hooks must not move the cache",
}
