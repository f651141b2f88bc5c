"""Linear layers and norms by recipe: conversion in place, autocast, scaling state, reports and counts."""
