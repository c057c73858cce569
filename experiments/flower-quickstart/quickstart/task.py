"""The network, the data and the training loop, as in Flower's PyTorch quickstart, on scikit-learn's digits."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CLASSES = tuple("0123456789")
TEST = 360
"""The last images are kept for the coordinator's test."""


class Net(nn.Module):
    """Flower's quickstart network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, len(CLASSES))

    def forward(self, images):
        x = self.pool(functional.relu(self.conv1(images)))
        x = self.pool(functional.relu(self.conv2(x)))
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def digits():
    """Images (n, 1, 8, 8) from 0 to 1, and targets (n, 10) of 0 and 1."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, functional.one_hot(torch.tensor(found.target), len(CLASSES)).float()


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """One site's training images."""
    images, targets = digits()
    own = slice(partition_id, len(images) - TEST, num_partitions)
    generator = torch.Generator().manual_seed(partition_id)
    return DataLoader(TensorDataset(images[own], targets[own]), batch_size, shuffle=True, generator=generator)


def own_classes(partition_id: int, labels_per_site: int):
    """The classes that a site labels: the next ones after those of the site before it, round and round."""
    return [CLASSES[(partition_id * labels_per_site + step) % len(CLASSES)] for step in range(labels_per_site)]


def train(net, loader, loss, epochs: int, lr: float) -> float:
    """Train with this loss of logits and targets; return its mean over the batches."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9), []
    net.train()
    for _ in range(epochs):
        for images, targets in loader:
            optimizer.zero_grad()
            value = loss(net(images), targets)
            value.backward()
            optimizer.step()
            losses.append(value.item())
    return float(np.mean(losses))


def test_auroc(net) -> dict[str, float]:
    """AUROC of each class on the coordinator's images."""
    images, targets = (part[-TEST:] for part in digits())
    net.eval()
    with torch.no_grad():
        scores = net(images)
    return {name: float(roc_auc_score(targets[:, row], scores[:, row])) for row, name in enumerate(CLASSES)}
