"""Federated training with user-level privacy: the server holds the door, and users are the privacy unit."""

from sfumato.federated.clients import Answers, Clients, LocalClients, Request
from sfumato.federated.methods import dope_sgd, dp_sgd, dp_sgd_beside_public
from sfumato.federated.public_users import PublicUsers
from sfumato.federated.questions import UpdateMean, private_users
from sfumato.federated.training import federate
from sfumato.federated.work import FED_SGD, LocalWork

__all__ = [
    "FED_SGD",
    "Answers",
    "Clients",
    "LocalClients",
    "LocalWork",
    "PublicUsers",
    "Request",
    "UpdateMean",
    "dope_sgd",
    "dp_sgd",
    "dp_sgd_beside_public",
    "federate",
    "private_users",
]
