"""Graph passes: one pass a file, named by its verb.

First the passes that decide (they write verdicts and never edit the graph), then those that rewrite
(they edit and never decide). Each file's docstring says what the pass does, why that is sound, and
shows a tiny before and after. ``ampgraph.pipeline`` lists them in the order in which they run.
"""

assert __name__ == "ampgraph.passes", "import ampgraph.passes: a bare `passes` is a second copy"
