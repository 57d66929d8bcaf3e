"""``spotlight doctor --gpu``: what cards do, measured."""
