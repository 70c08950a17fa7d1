//! A prefix tree over token ids: which known sequence is the longest beginning of a prompt?

use std::collections::BTreeMap;

/// Values at the ends of token sequences, found by prefix. Edges are compressed: a node for every end and every
/// place where known sequences part.
#[derive(Debug)]
pub(crate) struct PrefixTree<T> {
    nodes: Vec<Option<Node<T>>>,
}

/// Names a node; stays valid as long as the node has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(usize);

#[derive(Debug)]
struct Node<T> {
    parent: usize,
    /// Tokens between the parent and here.
    edge: Vec<u32>,
    /// Tokens between the root and here.
    depth: usize,
    /// By the first token of their edges.
    children: BTreeMap<u32, usize>,
    value: Option<T>,
}

/// What a tree knows of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Nodes with values on the way, shallowest first.
    pub(crate) valued: Vec<NodeId>,
    /// Tokens that some known sequence begins with too.
    pub(crate) common: usize,
}

const ROOT: usize = 0;

impl<T> PrefixTree<T> {
    /// A tree that knows nothing.
    pub(crate) fn new() -> PrefixTree<T> {
        let root = Node { parent: ROOT, edge: Vec::new(), depth: 0, children: BTreeMap::new(), value: None };
        PrefixTree { nodes: vec![Some(root)] }
    }

    /// Follows `tokens` as far as they are known.
    pub(crate) fn walk(&self, tokens: &[u32]) -> Walk {
        let mut walk = Walk { valued: Vec::new(), common: 0 };
        let mut at = ROOT;
        loop {
            let node = self.node(at);
            if node.value.is_some() {
                walk.valued.push(NodeId(at));
            }
            let rest = &tokens[node.depth..];
            let Some(&child) = rest.first().and_then(|first| node.children.get(first)) else { return walk };
            let edge = &self.node(child).edge;
            let same = common(edge, rest);
            walk.common = node.depth + same;
            if same < edge.len() {
                return walk;
            }
            at = child;
        }
    }

    /// Makes `tokens` known, and gives their end a value; returns the one it had.
    pub(crate) fn insert(&mut self, tokens: &[u32], value: T) -> (NodeId, Option<T>) {
        let mut at = ROOT;
        loop {
            let depth = self.node(at).depth;
            if depth == tokens.len() {
                return (NodeId(at), self.node_mut(at).value.replace(value));
            }
            let rest = &tokens[depth..];
            match self.node(at).children.get(&rest[0]).copied() {
                None => {
                    let leaf = Node {
                        parent: at,
                        edge: rest.to_vec(),
                        depth: tokens.len(),
                        children: BTreeMap::new(),
                        value: None,
                    };
                    at = self.attach(leaf);
                }
                Some(child) => {
                    let same = common(&self.node(child).edge, rest);
                    at = if same < self.node(child).edge.len() { self.split(child, same) } else { child };
                }
            }
        }
    }

    /// Takes a node's value away, and forgets what is known only for its sake.
    pub(crate) fn remove(&mut self, id: NodeId) -> Option<T> {
        let value = self.nodes.get_mut(id.0)?.as_mut()?.value.take();
        let mut at = id.0;
        while at != ROOT && self.node(at).value.is_none() {
            let node = self.node(at);
            let (parent, first) = (node.parent, node.edge[0]);
            match node.children.len() {
                0 => {
                    self.nodes[at] = None;
                    self.node_mut(parent).children.remove(&first);
                    at = parent;
                }
                1 => {
                    let child = *node.children.values().next().expect("one child");
                    let mut edge = self.nodes[at].take().expect("a node").edge;
                    edge.append(&mut self.node_mut(child).edge);
                    self.node_mut(child).edge = edge;
                    self.node_mut(child).parent = parent;
                    self.node_mut(parent).children.insert(first, child);
                    break;
                }
                _ => break,
            }
        }
        value
    }

    /// The value of a node.
    pub(crate) fn get(&self, id: NodeId) -> Option<&T> {
        self.nodes.get(id.0)?.as_ref()?.value.as_ref()
    }

    /// As [`PrefixTree::get`], to change.
    pub(crate) fn get_mut(&mut self, id: NodeId) -> Option<&mut T> {
        self.nodes.get_mut(id.0)?.as_mut()?.value.as_mut()
    }

    /// Tokens from the root to a node.
    pub(crate) fn depth(&self, id: NodeId) -> usize {
        self.node(id.0).depth
    }

    /// The nodes above this one that have values, nearest first.
    pub(crate) fn above(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let mut at = id.0;
        std::iter::from_fn(move || {
            while at != ROOT {
                at = self.node(at).parent;
                if self.node(at).value.is_some() {
                    return Some(NodeId(at));
                }
            }
            None
        })
    }

    /// Every node that has a value.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &T)> {
        let value = |node: &'_ Option<Node<T>>| node.as_ref().is_some_and(|node| node.value.is_some());
        (0..self.nodes.len())
            .filter(move |&index| value(&self.nodes[index]))
            .map(|index| (NodeId(index), self.node(index).value.as_ref().expect("filtered")))
    }

    fn node(&self, index: usize) -> &Node<T> {
        self.nodes[index].as_ref().expect("linked nodes exist")
    }

    fn node_mut(&mut self, index: usize) -> &mut Node<T> {
        self.nodes[index].as_mut().expect("linked nodes exist")
    }

    /// Stores a node and links it to its parent.
    fn attach(&mut self, node: Node<T>) -> usize {
        let (parent, first) = (node.parent, node.edge[0]);
        let free = self.nodes.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.nodes.push(None);
            self.nodes.len() - 1
        });
        self.nodes[index] = Some(node);
        self.node_mut(parent).children.insert(first, index);
        index
    }

    /// Puts a node on the edge to `child`, after `len` of its tokens.
    fn split(&mut self, child: usize, len: usize) -> usize {
        let rest = self.node_mut(child).edge.split_off(len);
        let edge = std::mem::replace(&mut self.node_mut(child).edge, rest);
        let (parent, depth) = (self.node(child).parent, self.node(child).depth);
        let first = self.node(child).edge[0];
        let depth = depth - self.node(child).edge.len();
        let children = BTreeMap::from([(first, child)]);
        let middle = self.attach(Node { parent, edge, depth, children, value: None });
        self.node_mut(child).parent = middle;
        middle
    }
}

/// How many tokens two sequences begin with alike.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deepest(tree: &PrefixTree<usize>, tokens: &[u32]) -> Option<usize> {
        tree.walk(tokens).valued.last().map(|&id| *tree.get(id).unwrap())
    }

    #[test]
    fn the_deepest_known_prefix_is_found() {
        let mut tree = PrefixTree::new();
        assert_eq!(tree.walk(&[1, 2]), Walk { valued: vec![], common: 0 });
        tree.insert(&[1, 2, 3, 4], 4);
        tree.insert(&[1, 2], 2);
        tree.insert(&[1, 2, 3, 9, 9], 5);
        assert_eq!(deepest(&tree, &[1, 2, 3, 4, 7]), Some(4));
        assert_eq!(deepest(&tree, &[1, 2, 3, 9]), Some(2));
        assert_eq!(tree.walk(&[1, 2, 3, 9]).common, 4);
        assert_eq!(deepest(&tree, &[1]), None);
        assert_eq!(tree.walk(&[1, 7]).common, 1);
        assert_eq!(tree.insert(&[1, 2], 20).1, Some(2));
    }

    #[test]
    fn removing_joins_and_prunes() {
        let mut tree = PrefixTree::new();
        let (long, _) = tree.insert(&[1, 2, 3, 4], 4);
        let (short, _) = tree.insert(&[1, 2], 2);
        assert_eq!(tree.above(long).collect::<Vec<_>>(), [short]);
        assert_eq!(tree.remove(short), Some(2));
        assert_eq!(tree.remove(short), None, "once");
        assert_eq!(deepest(&tree, &[1, 2, 3, 4]), Some(4));
        assert_eq!(tree.depth(long), 4);
        assert_eq!(tree.remove(long), Some(4));
        assert_eq!(tree.iter().count(), 0);
        assert_eq!(tree.nodes.iter().flatten().count(), 1, "only the root is left");
    }

    /// Against a list of all sequences, searched from end to end.
    #[test]
    fn agrees_with_a_plain_list() {
        let mut tree = PrefixTree::new();
        let mut list: Vec<(Vec<u32>, NodeId)> = Vec::new();
        let mut state = 12345u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for round in 0..3000 {
            let tokens: Vec<u32> = (0..draw(9)).map(|_| draw(3) as u32).collect();
            match draw(3) {
                0 => {
                    let (id, old) = tree.insert(&tokens, round);
                    assert_eq!(old.is_some(), list.iter().any(|(known, _)| *known == tokens));
                    list.retain(|(known, _)| *known != tokens);
                    list.push((tokens, id));
                }
                1 if !list.is_empty() => {
                    let (_, id) = list.swap_remove(draw(list.len() as u64) as usize);
                    assert!(tree.remove(id).is_some());
                }
                _ => {
                    let walk = tree.walk(&tokens);
                    let mut found: Vec<usize> = walk.valued.iter().map(|&id| tree.depth(id)).collect();
                    let mut expected: Vec<usize> = (list.iter())
                        .filter(|(known, _)| tokens.starts_with(known))
                        .map(|(known, _)| known.len())
                        .collect();
                    expected.sort_unstable();
                    found.sort_unstable();
                    assert_eq!(found, expected);
                    let longest = list.iter().map(|(known, _)| common(known, &tokens)).max().unwrap_or(0);
                    assert_eq!(walk.common, longest);
                }
            }
        }
        assert_eq!(tree.iter().count(), list.len());
    }
}
