"""Ordinary FLARE components with which a job of anybody's averages by the name of a class.

`MethodAggregator` aggregates for FLARE's FedAvg and ScatterAndGather as a method of Suture does,
`SiteRowsFilter` sends each site the rows of its own classes, and `DeclaredResultFilter` guards a site.
`contract` says what they exchange; a training script uses `suture.flare.client`.
"""

from suture.flare.components.aggregator import MethodAggregator as MethodAggregator
from suture.flare.components.filters import DeclaredResultFilter as DeclaredResultFilter
from suture.flare.components.filters import SiteRowsFilter as SiteRowsFilter
