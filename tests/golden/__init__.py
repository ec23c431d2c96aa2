"""Golden gradients: numbers of the library at one commit, with the inputs that made them.

`nets` has the models, `table` the rules and the paths, `paths` the calls, `plain` the same gradients
in plain JAX. `make` computes, stores and compares them; the arrays are in one file for each model.
"""
