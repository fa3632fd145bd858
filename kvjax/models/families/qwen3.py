"""Qwen3 (Yang et al. 2025, section 2): Llama whose queries and keys are normalised before RoPE.

Each head of q and of k is divided by its root mean square and multiplied by a weight [d], one of
all heads of q and one of k (QK-norm); q, k and v have no biases. The head dimension is stated:
it need not be hidden over heads. Parameters beside Llama's:

=================  ================  ===================================  =====================
path               shape             logical axes                         initialiser
=================  ================  ===================================  =====================
layers/q_norm      [d]               head_dim                             ones
layers/k_norm      [d]               head_dim                             ones
=================  ================  ===================================  =====================
"""

from flax import nnx
from jaxtyping import Array

from kvjax.models.config import ModelConfig
from kvjax.models.families.llama import Llama, LlamaLayer, norm_spec, rms_norm
from kvjax.models.family import ParamSpec
from kvjax.models.rope import rotate


class Qwen3Layer(LlamaLayer):
    """One decoder layer."""

    q_norm: nnx.Param
    k_norm: nnx.Param

    @classmethod
    def table(cls, config: ModelConfig) -> dict[str, ParamSpec]:
        table = super().table(config)
        for index, name in enumerate(("q_norm", "k_norm"), start=10):
            hf, gguf = f"self_attn.{name}.weight", f"attn_{name}.weight"
            table[name] = norm_spec(config.head_dim, "head_dim", index, hf, gguf)
        return table

    def project(
        self, config: ModelConfig, hidden: Array, cos: Array, sin: Array
    ) -> tuple[Array, Array, Array]:
        q, k, v = self.unrotated(config, hidden)
        q = rms_norm(q, self.q_norm[...], config.rms_norm_eps)
        k = rms_norm(k, self.k_norm[...], config.rms_norm_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class Qwen3(Llama):
    """The whole model."""

    layer_class = Qwen3Layer
