"""The advertising market: advertisers, traffic, auctions, bidders, what a bidder observes."""
