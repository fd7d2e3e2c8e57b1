"""Logs of auctions: tables in the format of AuctionNet, traffic, days to replay."""
