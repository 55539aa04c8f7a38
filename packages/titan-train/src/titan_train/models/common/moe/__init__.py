"""A mixture of experts as a plain module.

- `layer`: `MoE`: route, dispatch, compute, add, and record the load.
- `router`: scores, groups, and the experts of each token.
- `dispatch`: sort tokens by expert and bring the results back.
- `experts`: stacked experts and their grouped products.
- `balance`: auxiliary losses, expert biases, and routing statistics over ranks.
"""
