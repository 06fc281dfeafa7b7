"""The GPT, built from a backend's layers. B batch, T tokens, D width, H query heads, G key/value
heads, E head width, V vocabulary."""

from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8stack.common.errors import UserError, described
from fp8stack.layers import Backend, build_backend
from fp8stack.layers.activation_checkpoint import contexts, hide_warning_of_in_place_operations
from fp8stack.layers.compiler import (
    CompileBackend,
    allow_many_compilations,
    compiled,
    require_compilable,
)
from fp8stack.layers.kernels.activations import ACTIVATIONS
from fp8stack.layers.kernels.attention import Mask, dense_mask, document_mask
from fp8stack.layers.kernels.kv_cache import KVCache
from fp8stack.model.config import GPTConfig, padded_vocabulary, plan_for
from fp8stack.model.initial_weights import initialize
from fp8stack.model.loss import head_loss
from fp8stack.model.mixture import MixtureMLP, Routing, RoutingRecord
from fp8stack.model.rope import rope_tables, rotate
from fp8stack.precision import Hardware

Recompute = Literal["none", "selective", "block"]


class Attention(nn.Module):
    """Causal self-attention, with grouped queries, RoPE and QK-norm where configured."""

    def __init__(self, config: GPTConfig, backend: Backend, path: str) -> None:
        super().__init__()
        self.config, self.backend, self.path = config, backend, path
        self.in_fp8 = backend.plan.recipe.fp8_attention  # the guard may switch it off
        shapes = config.linear_shapes()
        qkv, output = f"{path}.qkv", f"{path}.output"
        self.qkv = backend.linear(qkv, *shapes[qkv], config.bias)
        backend.add_attention(path)
        self.output = backend.linear(output, *shapes[output], config.bias)
        if config.qk_norm:
            query_width, key_width = config.norm_widths
            self.query_norm = backend.norm("rmsnorm", query_width, config.norm_eps, False)
            self.key_norm = backend.norm("rmsnorm", key_width, config.norm_eps, False)

    def forward(
        self,
        qkv_BTF: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Mask | None = None,
        cached: tuple[KVCache, int] | None = None,
    ) -> Tensor:
        """The output of `qkv`, [B, T, (H + 2 G) E] -> [B, T, D] in the compute dtype.

        Args:
            rotation: RoPE's cosines and sines at the tokens' positions.
            mask: see `Backend.attention`.
            cached: the keys and values of earlier tokens, and the index of this layer.
        """
        config = self.config
        groups = config.query_groups
        heads_BTHE = rearrange(qkv_BTF, "b t (h e) -> b t h e", e=config.head_dim)
        # Split before the transpose: the gradients then have the layout of `qkv_BTF`, uncopied.
        heads = torch.split(heads_BTHE, [config.heads, groups, groups], dim=2)
        if config.qk_norm == "width":
            q_BTHE, k_BTGE = self._normed_over_heads(*heads[:2])
            heads = (q_BTHE, k_BTGE, heads[2])
        q_BHTE, k_BGTE, v_BGTE = (x_BTHE.transpose(1, 2) for x_BTHE in heads)
        if config.qk_norm is True:
            q_BHTE, k_BGTE = self.query_norm(q_BHTE.float()), self.key_norm(k_BGTE.float())
        if rotation is not None:
            q_BHTE, k_BGTE = rotate(q_BHTE, *rotation), rotate(k_BGTE, *rotation)
        if cached is not None:
            cache, layer = cached
            k_BGTE, v_BGTE = cache.extended(layer, k_BGTE, v_BGTE)
        dropout = config.dropout if self.training else 0.0
        path = self.path if self.in_fp8 else None
        y_BHTE = self.backend.attention(
            q_BHTE, k_BGTE, v_BGTE, dropout=dropout, mask=mask, path=path
        )
        y: Tensor = self.output(rearrange(y_BHTE, "b h t e -> b t (h e)"))
        return y

    def _normed_over_heads(self, q_BTHE: Tensor, k_BTGE: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, each normalized over all its heads together: float32."""
        q_BTF = self.query_norm(q_BTHE.flatten(2).float())
        k_BTF = self.key_norm(k_BTGE.flatten(2).float())
        return q_BTF.view(q_BTHE.shape), k_BTF.view(k_BTGE.shape)


class MLP(nn.Module):
    """Two linears around an activation; SwiGLU's gate and value are one GEMM, gate first. It is a
    block's MLP, or the shared experts of one."""

    def __init__(self, config: GPTConfig, backend: Backend, path: str) -> None:
        super().__init__()
        self.activation = config.activation
        shapes = config.linear_shapes()
        up, down = f"{path}.up", f"{path}.down"
        self.up = backend.linear(up, *shapes[up], config.bias)
        self.down = backend.linear(down, *shapes[down], config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] float32 -> [B, T, D] in the compute dtype."""
        y: Tensor = self.down(ACTIVATIONS[self.activation](self.up(x_BTD)))
        return y


class Compilable(nn.Module):
    """A module whose forward pass can be compiled; copies of it are not compiled."""

    def compile_forward(
        self, backend: CompileBackend, mode: str = "default", *, fullgraph: bool = True
    ) -> None:
        """Compile `forward` alone, see `compiled`: hooks on the module, such as FSDP2's, stay
        outside."""
        self.forward = compiled(self.forward, backend, mode, fullgraph=fullgraph)

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_forward` was called."""
        return "forward" in vars(self)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "forward"}


class Block(Compilable):
    """Pre-norm attention and MLP on a residual stream in the recipe's dtype: the addends and the
    sum are rounded to it.

    Attributes:
        selective: whether the forward pass is checkpointed selectively, which compiled code has to
            do within it.
    """

    selective = False

    def __init__(self, config: GPTConfig, backend: Backend, path: str) -> None:
        super().__init__()
        self.backend = backend
        norm = (config.norm, config.width, config.norm_eps, config.bias)
        self.attention_norm = backend.norm(*norm)
        self.attention = Attention(config, backend, f"{path}.attention")
        self.mlp_norm = backend.norm(*norm)
        self.mlp = _mlp(config, backend, f"{path}.mlp")
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Mask | None = None,
        cached: tuple[KVCache, int] | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        """[B, T, D] -> [B, T, D] in the same dtype, and with experts the `Routing`; for other
        arguments see `Attention.forward`."""
        if self.selective and torch.is_grad_enabled():
            output: Tensor | tuple[Tensor, Routing] = checkpoint(
                self._run, x_BTD, rotation, mask, None, use_reentrant=False, context_fn=contexts
            )
            return output
        return self._run(x_BTD, rotation, mask, cached)

    def _run(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Mask | None,
        cached: tuple[KVCache, int] | None,
    ) -> Tensor | tuple[Tensor, Routing]:
        qkv_BTF = self.backend.norm_linear(x_BTD.float(), self.attention_norm, self.attention.qkv)
        mixed = self.attention(qkv_BTF, rotation, mask, cached)
        x_BTD = x_BTD + self.dropout(mixed).to(x_BTD.dtype)
        routing = None
        if isinstance(self.mlp, MixtureMLP):
            expanded, routing = self.mlp(self.mlp_norm(x_BTD.float()))
        else:
            expanded = self.backend.norm_mlp(x_BTD.float(), self.mlp_norm, self.mlp)
        x_BTD = x_BTD + self.dropout(expanded).to(x_BTD.dtype)
        return x_BTD if routing is None else (x_BTD, routing)


def _mlp(config: GPTConfig, backend: Backend, path: str) -> MLP | MixtureMLP:
    """The MLP of a block, or its experts."""
    if f"{path}.router" not in config.routers:
        return MLP(config, backend, path)
    shapes = config.linear_shapes()
    shared = f"{path}.shared"
    return MixtureMLP(
        config, backend, path, MLP(config, backend, shared) if f"{shared}.up" in shapes else None
    )


class Loss(Compilable):
    """Final norm, head and loss as one module to compile; the two layers are arguments."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.chunk_rows: int | None = None  # see `head_loss`

    def forward(
        self, norm: nn.Module, head: nn.Module, x_BTD: Tensor, targets_BT: Tensor
    ) -> Tensor:
        """The mean cross-entropy of `head(norm(x))` in nats per token: float32, 0-dim."""
        x_BTD = norm(x_BTD.float())
        return head_loss(head, x_BTD, targets_BT, self.vocabulary, self.chunk_rows)


class GPT(nn.Module):
    """A decoder-only transformer, built from a backend's layers.

    Args:
        config: its shape.
        backend: builds the layers; None: float32 torch.
        seed: the seed of the initial weights, which depend only on it and on `config`: they are the
            same for every recipe and device. None leaves them uninitialized.

    Attributes:
        routing: what the routers of experts reported since `routing.begin()` was called last.
        recompute: activation checkpointing. Blocks save for the backward pass: everything ("none"),
            their inputs and the outputs of GEMMs and attention ("selective"), or their inputs only
            ("block"). The gradients are the same to the bit.
    """

    def __init__(
        self, config: GPTConfig, backend: Backend | None = None, *, seed: int | None = 0
    ) -> None:
        super().__init__()
        if not (isinstance(config, GPTConfig) and isinstance(backend, Backend | None)):
            raise UserError(
                "GPT needs a GPTConfig and a backend, such as GPT(config, build_backend(plan)), "
                f"not {described(config)} and {described(backend)}."
            )
        if backend is None:
            backend = build_backend(plan_for(config, "fp32", Hardware("cpu")))
        self.config, self.backend = config, backend
        self.recompute: Recompute = "none"
        self.routing = RoutingRecord()
        padded = padded_vocabulary(config, backend.vocabulary_multiple)
        self.embedding = nn.Embedding(padded, config.width)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        paths = (f"blocks.{i}" for i in range(config.layers))
        self.blocks = nn.ModuleList(Block(config, backend, path) for path in paths)
        self.final_norm = backend.norm(config.norm, config.width, config.norm_eps, config.bias)
        self.lm_head = backend.linear("lm_head", config.width, padded, False)
        self.loss = Loss(config.vocabulary)
        if config.tied:
            self.lm_head.weight = self.embedding.weight
        self._rotations: dict[torch.device, tuple[Tensor, Tensor]] = {}
        if seed is not None:
            initialize(self, config, seed)
        backend.attach(self)
        self.register_forward_pre_hook(backend.set_matmul_precision)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits, or the loss if there are targets.

        Args:
            tokens_BT: int64 [B, T], below the vocabulary; T is at most the context.
            targets_BT: int64 [B, T], the next tokens; -100 is ignored.
            documents_BT: int64 [B, T], the document of each token: attention stays within a
                document. Positions count through the whole row.
            cache: a cache from `new_cache`; `tokens_BT` follow its tokens and are added to it.
                Not in training, and not together with documents.

        Returns:
            float32 [B, T, V], or the mean cross-entropy in nats per token, 0-dim. While a model
            with experts trains, the gradients are those of this loss and of the losses of its
            routers, which are not in the value.

        Raises:
            ValueError: the tokens, including the cache's, exceed the context or the cache's size;
                a cache in training or with documents.
        """
        start = 0 if cache is None else cache.length
        T, context = tokens_BT.shape[1], self.config.context
        if context < start + T:
            raise ValueError(f"{start + T} tokens are more than the model's context, {context}.")
        if cache is not None and cache.room < start + T:
            raise ValueError(f"{start + T} tokens are more than the cache's {cache.room}.")
        mask = self._mask(T, documents_BT, cache, tokens_BT.device)
        x_BTD = self.embedding(tokens_BT)
        rotation = None
        if self.config.positions == "learned":
            x_BTD = x_BTD + self.position_embedding.weight[start : start + T]
        else:
            cosine, sine = self._rotation(x_BTD.device)
            rotation = (cosine[start : start + T, None], sine[start : start + T, None])
        x_BTD = self.dropout(x_BTD).to(self.backend.residual_dtype)
        x_BTD, routings = self._through_blocks(x_BTD, rotation, mask, cache)
        if targets_BT is not None:
            loss: Tensor = self.loss(self.final_norm, self.lm_head, x_BTD, targets_BT)
            if routings and self.training and torch.is_grad_enabled():
                self.routing.add(routings)
                of_routers = torch.stack([routing.loss for routing in routings]).sum()
                loss = loss + (of_routers - of_routers.detach())
            return loss
        logits_BTV: Tensor = self.lm_head(self.final_norm(x_BTD.float())).float()
        return logits_BTV[..., : self.config.vocabulary]  # without the padding

    def leave_fp8(self, path: str) -> None:
        """Run the linear, the experts or the attention at a module path without FP8, if it is in
        FP8."""
        module: Any = self.get_submodule(path)
        if getattr(module, "in_fp8", False):
            module.in_fp8 = False

    def _mask(
        self, T: int, documents_BT: Tensor | None, cache: KVCache | None, device: torch.device
    ) -> Mask | None:
        """The attention mask, built once for all blocks; None for plain causal attention."""
        if cache is None:
            if documents_BT is None:
                return None
            drops = self.training and self.config.dropout > 0
            return document_mask(
                documents_BT,
                self.backend.attention_dtype,
                head_width=self.config.head_dim,
                all=drops or self.recompute == "selective",
            )
        if documents_BT is not None or torch.is_grad_enabled():
            raise ValueError("A cache serves generation alone: torch.no_grad() and no documents.")
        if cache.length == 0 or T == 1:
            return None
        shape = (1, 1, T, cache.length + T)
        allowed = torch.ones(shape, dtype=torch.bool, device=device).tril(cache.length)
        return dense_mask(allowed, self.backend.attention_dtype)

    def _through_blocks(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Mask | None,
        cache: KVCache | None,
    ) -> tuple[Tensor, list[Routing]]:
        """Run all blocks on the residual stream: [B, T, D] -> [B, T, D] in the same dtype, and the
        routing of each block with experts."""
        routings: list[Routing] = []
        if cache is not None:
            for layer, block in enumerate(self.blocks):
                x_BTD = _stream(block(x_BTD, rotation, mask, (cache, layer)), routings)
            cache.length += x_BTD.shape[1]
            return x_BTD, routings
        # Wrappers of a block's forward pass need to handle a mask only with documents.
        arguments = (rotation,) if mask is None else (rotation, mask)
        for block in self.blocks:
            plain = self.recompute == "none" or not torch.is_grad_enabled()
            if self._is_checkpointed_within(block) or plain:
                output = block(x_BTD, *arguments)
            elif self.recompute == "block":
                output = checkpoint(block, x_BTD, *arguments, use_reentrant=False)
            else:
                output = checkpoint(
                    block, x_BTD, *arguments, use_reentrant=False, context_fn=contexts
                )
            x_BTD = _stream(output, routings)
        return x_BTD, routings

    def _is_checkpointed_within(self, block: nn.Module) -> bool:
        """Whether a block's own code checkpoints it, as compiled code does selectively; the block
        is told so."""
        if not isinstance(block, Block):
            return False
        selective = self.recompute == "selective" and block.is_compiled
        if block.selective != selective:
            block.selective = selective
            self.backend.note_compiled_calls()
        return selective

    def update_biases(self, counts: Tensor, skips: Tensor) -> None:
        """Call `MixtureMLP.update_bias` of each block with experts, with its row of `counts`."""
        mixtures = [block.mlp for block in self.blocks if isinstance(block.mlp, MixtureMLP)]
        for mixture, of_layer in zip(mixtures, counts, strict=True):
            mixture.update_bias(of_layer, skips)

    def saved_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as checkpoints hold them; tied parameters once."""
        buffers = self.config.buffer_shapes()
        return dict(self.named_parameters()) | {name: self.get_buffer(name) for name in buffers}

    def new_cache(self, batch: int = 1, tokens: int | None = None) -> KVCache:
        """An empty KV cache on the model's device for `batch` sequences of `tokens` tokens, the
        context if None: 2 x layers x batch x G x tokens x E elements in attention's dtype."""
        config, device = self.config, self.embedding.weight.device
        shape = (batch, config.query_groups, tokens or config.context, config.head_dim)
        return KVCache(len(self.blocks), shape, self.backend.attention_dtype, device)

    def compile_blocks(self, backend: CompileBackend = "inductor", mode: str = "default") -> None:
        """Compile the model in place, without graph breaks except around Transformer Engine's
        modules: the loss, the casts of weights, and each block separately, so that equal blocks
        share a compilation. `backend` and `mode` are torch.compile's. Raises a UserError if
        Transformer Engine's modules are to be checkpointed selectively."""
        require_compilable(self.backend.plan, self.recompute)
        allow_many_compilations()
        hide_warning_of_in_place_operations()
        for module in self.modules():
            if isinstance(module, Compilable):
                module.compile_forward(backend, mode, fullgraph=self.backend.compiles_whole)
        self.backend.compile_casts(backend, mode)

    def _rotation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """RoPE's tables, cached per device; not a buffer, which `model.bfloat16()` would round."""
        if device not in self._rotations:
            with torch.inference_mode(False):  # or later training passes would fail
                self._rotations[device] = rope_tables(self.config, device)
        return self._rotations[device]


def _stream(output: Tensor | tuple[Tensor, Routing], routings: list[Routing]) -> Tensor:
    """The residual stream after a block; its routing, if it has experts, joins `routings`."""
    if isinstance(output, Tensor):
        return output
    routings.append(output[1])
    return output[0]
