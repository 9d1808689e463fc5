"""Transfers: the machinery that persistent tiers share between a submit and its completion.

::

    TransferScheduler    in which order reads, writes and commits run
      WriteQueues        writes that wait for their turn or for room
      BlockRunner        has workers move blocks
        Backlog, lanes   which block is next
        Workers          threads
    TransferMaker        what a tier adds: how its transfers and commits do their work
    ByteRange, Block     how a transfer is cut into what workers move
"""
