import pytest

from async_grpo.weights.server_names import unknown_names

LAYER = "model.layers.0."
DENSE = {
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    LAYER + "self_attn.qkv_proj.weight",
    LAYER + "self_attn.qkv_proj.bias",
    LAYER + "self_attn.o_proj.weight",
    LAYER + "mlp.gate_up_proj.weight",
    LAYER + "mlp.down_proj.weight",
}
EXPERTS = {
    LAYER + "mlp.experts.w13_weight",
    LAYER + "mlp.experts.w2_weight",
    LAYER + "mlp.gate.weight",
}


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        LAYER + "self_attn.q_proj.weight",
        LAYER + "self_attn.v_proj.bias",
        LAYER + "self_attn.o_proj.weight",
        LAYER + "mlp.gate_proj.weight",
        LAYER + "mlp.up_proj.weight",
        LAYER + "mlp.down_proj.weight",
    ],
)
def test_fused_projections_are_known(name):
    assert unknown_names([name], DENSE) == []


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_fused_experts_are_known(part):
    assert unknown_names([LAYER + f"mlp.experts.17.{part}.weight"], EXPERTS) == []


def test_a_misspelt_or_foreign_tensor_is_not():
    sent = [LAYER + "self_attn.q_proj.weight", LAYER + "self_attn.q_prj.weight", "visual.x"]
    assert unknown_names(sent, DENSE) == sent[1:]
    assert unknown_names([LAYER + "mlp.gate_proj.weight"], EXPERTS) != []


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_shared_experts_that_a_server_keeps_among_the_others_are_known(part):
    name = LAYER + f"mlp.shared_experts.{part}.weight"
    assert unknown_names([name], EXPERTS) == []
    assert unknown_names([name], DENSE) == [name]
