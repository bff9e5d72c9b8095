"""The names of the plugin's fixtures: a test that takes one of them is a test of attention kernels."""

FIXTURES = frozenset(
    (
        *("attn", "attn_backend", "attn_workload", "attn_device", "qkv", "attn_reference", "assert_attention_close"),
        "attn_model",
    )
)
#: those that a test with the marker attention_model may take
OF_MODELS = frozenset(("attn_model", "attn_backend"))
#: the fixture through which an item gets its `CaseParameter`
PARAMETER = "_attn_parameter"
