"""The passes of the CPU, which lay weights out for its kernels, and the ops that they add.

* :mod:`packed_ops` and :mod:`packed_filters` have the ops;
* :mod:`pack` packs the weights of products and convolutions, :mod:`pack_experts` those of experts;
* :mod:`merge_products` merges products of one x.
"""
