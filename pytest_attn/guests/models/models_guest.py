"""The guest models: the marker attention_model, its fixture, `attn.check_module` and `attn.through`."""

from pytest_attn.seam import Guest, Kind

MODEL = Kind(
    marker="attention_model",
    maker="pytest_attn.guests.models.model_case:make_model_case",
    must_call="attn_model.check",
    fixture="attn_model",
    takes=("attn_model", "attn_backend"),
    items="pytest_attn.guests.models.model_items:ModelItems",
    unknown="model",
    about="""A model's attention: compares every call that a model makes with exact attention on its own tensors.

    Example::

        @pytest.mark.attention_model
        def test_my_model(attn_model, attn_backend):
            model = MyModel().to(attn_model.device)
            attn_model.check(model, lambda: loss(model(batch)), attn_backend)

    attn_model.device is the device of the marker or of --attn-device. attn_model.check(model, step, backend=None) runs the
    step forward and backward, and lets a backend compute the calls where one is given. It raises AssertionError, naming the
    layer, where a call is wrong or was not replaced.

    Under the marker `attention`, attn.check_module(module) judges one layer on the workload's batch and q_len, and
    attn.through(module, q="to_q", k="to_k", v="to_v", out="to_out") returns what a layer computes between its projections as a
    callable of (q, k, v).
    """,
)
GUEST = Guest(
    kinds=(MODEL,),
    fields="pytest_attn.guests.models.model_record:ModelFields",
    lines="pytest_attn.guests.models.model_record:call_tables",
    timed="pytest_attn.guests.models.model_record:step_lines",
    methods={
        "check_module": "pytest_attn.guests.models.model_case:check_module",
        "through": "pytest_attn.guests.models.through:through",
    },
    commands=("pytest_attn.guests.models.capture_command:add_capture",),
)
