"""Limits of the status server, so that one sender cannot take what the others need: connections, requests, rates.

`server.py` connects the parts. They decide nothing about reports.
"""

from ppojob_operator.status_server.limits.connections import ConnectionLimits, Connections
from ppojob_operator.status_server.limits.listener import Listener, close_after_answer
from ppojob_operator.status_server.limits.rates import Rates
from ppojob_operator.status_server.limits.requests import JobRequests, RequestLimits

__all__ = ["ConnectionLimits", "Connections", "JobRequests", "Listener", "Rates", "RequestLimits", "close_after_answer"]
