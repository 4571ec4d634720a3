"""Combination weights of heads, by quadratic programs over the simplex."""
