"""Which versions of which models a service has, agreed on by all its replicas, and how that changes while it answers.

`actor` alone knows Ray; the rest is plain asyncio and data.
"""
