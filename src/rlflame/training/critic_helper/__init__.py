"""A second process for PPO's gradients, which has the critic's half while this one has the actor's.

While a batch is learned from, the processors of the workers have nothing to do; one of them does
this. The bits are those of one process, and a companion that is lost costs time and nothing else.
`rules` says which recipes come in halves, `link` is what passes between the two processes, `child`
the companion's side, `lead` this one.
"""
