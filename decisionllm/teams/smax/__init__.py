"""JAXMARL's SMAX: a battle of two teams."""
