"""Golden gradients: numbers of the library at one commit, with the inputs that made them.

`nets` has the models, `table` the rules and the paths, `paths` the calls, `plain` the same
gradients in plain JAX. `make` computes, stores and compares them. There is one file of arrays for
each model.
"""
