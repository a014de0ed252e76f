"""The pictures of a report, each drawn by one function from typed values and returned as the bytes of a PNG."""

from appa_flwr.report.plots.results import TradeOffPoint, trade_off

__all__ = ["TradeOffPoint", "trade_off"]
