"""BERT (Devlin et al. 2018) with the pooler, as transformers exports it: dynamic batch and sequence, GELU as five nodes."""

import math

import numpy as np

from whet.zoo.layers import gelu, gemm, layer_norm, linear
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter, make_normal_init

VOCABULARY, POSITIONS, TYPES, EPS = 30_522, 512, 2, 1e-12
STD = 0.02                            # initial value of the published training


def bert(g: GraphWriter, *, layers: int = 12, hidden: int = 768, heads: int = 12, sequence: int | str = "sequence",
         classes: int = 0, decomposed_layer_norm: bool = False) -> None:
    """Maps token ids to last_hidden_state[N,sequence,hidden] and pooler_output[N,hidden].

    Inputs are input_ids, attention_mask (1 = a token, 0 = padding) and token_type_ids, all int64 [N,sequence].
    With classes > 0 a linear classifier on the pooled state follows, and logits[N,classes] is the only output.
    """
    names = ("input_ids", "attention_mask", "token_type_ids")
    ids, mask, types = (g.input(n, (g.batch, sequence), "int64") for n in names)
    if classes:
        with g.scope("bert"):
            state = _build_encoder(g, ids, mask, types, layers, hidden, heads, sequence, decomposed_layer_norm)
            pooled = _build_pooler(g, state, hidden)
        g.output(gemm(g, pooled, "classifier", hidden, classes), "logits", (g.batch, classes))
        return
    state = _build_encoder(g, ids, mask, types, layers, hidden, heads, sequence, decomposed_layer_norm)
    pooled = _build_pooler(g, state, hidden)
    g.output(state, "last_hidden_state", (g.batch, sequence, hidden))
    g.output(pooled, "pooler_output", (g.batch, hidden))


def _build_encoder(g: GraphWriter, ids: str, mask: str, types: str, layers: int, hidden: int, heads: int, sequence: int | str,
             decomposed: bool) -> str:
    added = g.op("Cast", g.op("Unsqueeze", g.op("Unsqueeze", mask, g.const([1])), g.const([2])), to=1)
    added = g.op("Mul", g.op("Sub", g.const(1.0, "float32"), added), g.const(np.finfo(np.float32).min, "float32"))
    x = _build_embeddings(g, ids, types, hidden, sequence, decomposed)
    with g.scope("encoder"):
        for i in range(layers):
            with g.scope(f"layer.{i}"):
                x = _build_layer(g, x, added, hidden, heads, sequence, decomposed)
    return x


def _build_embeddings(g: GraphWriter, ids: str, types: str, hidden: int, sequence: int | str, decomposed: bool) -> str:
    with g.scope("embeddings"):
        table = g.table("position_ids", np.arange(POSITIONS, dtype=np.int64).reshape(1, POSITIONS))
        length = g.op("Unsqueeze", g.dim(ids, 1), g.const([0])) if isinstance(sequence, str) else g.const([sequence])
        positions = g.op("Slice", table, g.const([0]), length, g.const([1]), g.const([1]))
        words = _build_embedding(g, "word_embeddings", VOCABULARY, hidden, ids)
        kinds = _build_embedding(g, "token_type_embeddings", TYPES, hidden, types)
        x = g.op("Add", g.op("Add", words, kinds), _build_embedding(g, "position_embeddings", POSITIONS, hidden, positions))
        return layer_norm(g, x, "LayerNorm", hidden, eps=EPS, decomposed=decomposed)


def _build_embedding(g: GraphWriter, name: str, rows: int, hidden: int, index: str) -> str:
    with g.scope(name):
        return g.op("Gather", g.weight("weight", (rows, hidden), make_normal_init(STD)), index)


def _build_layer(g: GraphWriter, x: str, mask: str, hidden: int, heads: int, sequence: int | str, decomposed: bool) -> str:
    with g.scope("attention"):
        with g.scope("self"):
            y = _build_attention(g, x, mask, hidden, heads, sequence)
        with g.scope("output"):
            x = layer_norm(g, g.op("Add", linear(g, y, "dense", hidden, hidden, std=STD), x), "LayerNorm", hidden, eps=EPS,
                           decomposed=decomposed)
    with g.scope("intermediate"):
        y = linear(g, x, "dense", hidden, 4 * hidden, std=STD)
        with g.scope("intermediate_act_fn"):
            y = gelu(g, y)
    with g.scope("output"):
        return layer_norm(g, g.op("Add", linear(g, y, "dense", 4 * hidden, hidden, std=STD), x), "LayerNorm", hidden, eps=EPS,
                          decomposed=decomposed)


def _build_attention(g: GraphWriter, x: str, mask: str, hidden: int, heads: int, sequence: int | str) -> str:
    size = hidden // heads

    def get_lengths(value: str) -> tuple[int | str, int | str]:
        return g.batch_of(value), sequence if isinstance(sequence, int) else g.dim(value, 1)

    def split(name: str, perm: list[int]) -> str:
        value = linear(g, x, name, hidden, hidden, std=2 * STD)      # twice the initial std, so that attention is not uniform
        return g.op("Transpose", g.op("Reshape", value, g.shape(*get_lengths(value), heads, size)), perm=perm)

    query, key, value = split("query", [0, 2, 1, 3]), split("key", [0, 2, 3, 1]), split("value", [0, 2, 1, 3])
    scores = g.op("Div", g.op("MatMul", query, key), g.const(math.sqrt(size), "float32"))
    weights = g.op("Softmax", g.op("Add", scores, mask), axis=-1)
    context = g.op("Transpose", g.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    return g.op("Reshape", context, g.shape(*get_lengths(context), hidden))


def _build_pooler(g: GraphWriter, state: str, hidden: int) -> str:
    with g.scope("pooler"):
        first = g.op("Gather", state, g.const(0), axis=1)
        pooled = gemm(g, first, "dense", hidden, hidden)
        with g.scope("activation"):
            return g.op("Tanh", pooled)


register("bert_base", bert, about="BERT base, uncased, with pooler; dynamic batch and sequence", parameters=109_482_240,
         count_options={"sequence": 128})
