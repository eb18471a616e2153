"""The graph of a Llama model: from a ragged batch of tokens to logits, and to the next tokens.

Inputs, in this order (``batch``, ``total_seq_len``, … are symbols; see `input_types`):

==================  ============================  ==============================================
tokens              si64 ``[total_seq_len]``      the new tokens of all sequences, one after
                                                  the other
input_row_offsets   u32 ``[batch + 1]``           where each sequence begins in ``tokens``
return_n_logits     si64 ``[1]``, on the CPU      for ``ReturnLogits.VARIABLE``: of how many last
                                                  tokens of each sequence; else not read
blocks              buffer, the cache's dtype     ``[pages, 2, layers, page_size, kv_heads,
                                                  head_dim]``, changed in place
cache_lengths       u32 ``[batch]``               tokens of each sequence that are cached
lookup_table        u32 ``[batch, max_pages]``    the pages of each sequence
max_lengths         u32 ``[steps, 2]``            the most new and the most cached tokens
==================  ============================  ==============================================

``with_sampling`` adds those of `max.pipelines.lib.sampling.inputs.sampling_input_types`: temperature,
top_k, top_p, min_p, seed, each ``[batch]``.

Outputs, in this order:

1. with sampling: the next tokens, si64 ``[batch]``;
2. the logits of the last token of each sequence, float32 ``[batch, vocab]``;
3. for ``ReturnLogits.ALL`` and ``VARIABLE``: the logits of all (the last n) tokens, float32
   ``[rows, vocab]``, and where each sequence begins in them, u32 ``[batch + 1]``.

Weights are named as `convert_state_dict` of ``weights.py`` gives them; `load_weights` checks them
and gives the registry for ``session.load(graph, weights_registry=…)``.
"""
