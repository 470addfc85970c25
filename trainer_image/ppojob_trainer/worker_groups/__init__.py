"""Roles as groups of processes on Ray: how they are placed, how they are called, and what each of them does.

The only Ray code besides `main`. `placement` and `launch` start processes, `dispatch` and `worker_group` call them,
`table` is the data that they exchange, `roles` is what they compute. The controller decides the order of phases.
"""
