"""Models of other frameworks as graphs: what all importers share, and a package per framework.

An importer reads a file into a :class:`~max.importers.source.SourceGraph` (nodes, constants, inputs and outputs by
name) and has a :class:`~max.importers.table.OpTable` of small functions, source op to graph ops. The rest is common:

- `values`: what a name of the source model stands for while it is imported: a tensor of the graph, an array that is
  known at import, sizes that are expressions over symbols, or a list of these;
- `node`: a node with its operands and attributes, as the functions see it;
- `walk`: stages the nodes of a source graph one after the other, gathers all nodes that cannot be staged;
- `build`: a source graph as one `max.graph.Graph`;
- `program`, `segment`: a source graph as segments that are staged when their inputs are known, for models whose
  structure depends on data;
- `control`: branches and loops;
- `functions`: functions of tensors that the graph API lacks, composed of its ops;
- `symbols`, `contents`, `errors`: names of dimensions, arithmetic on known contents, errors.
"""
